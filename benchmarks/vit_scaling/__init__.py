"""The study's tables on whatever devices there are: throughput, memory, scaling, and what limits."""
