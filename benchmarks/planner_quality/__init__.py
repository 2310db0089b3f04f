"""How good and how quick the planner's partitions are, beside the rules and libraries that people use."""
