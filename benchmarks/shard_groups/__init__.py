"""Shard groups: what layouts cost, and what memory costs where the fast devices have little of it."""
