"""Step times and memory that both strategies predict, against what emulated runs then take."""
