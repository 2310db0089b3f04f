"""Set-up of both strategies for 1,024 ranks, without devices."""
