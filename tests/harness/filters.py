"""Warnings that are not ours to fix; everything else is an error, in the main process and in every rank.

Filters are in pytest's ini form: ``action:start of message (a regular expression):category``.
"""

IGNORED_WARNINGS: tuple[str, ...] = (
    # lightning 2.6.6 builds every CombinedLoader with a torch class that torch 2.14 deprecates
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    # torch 2.11's own compiler, where it is imported
    r"ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    # advice about speed that a test with a dozen samples cannot follow
    r"ignore:The '\w+' does not have many workers:UserWarning",
    r"ignore:The number of training batches \(\d+\) is smaller than the logging interval:UserWarning",
)
