"""Models as chains of units: the smallest things that a plan moves."""
