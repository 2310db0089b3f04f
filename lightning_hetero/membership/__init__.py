"""Who is in which process group, who owns what, and what each rank holds and writes: without a device or torch."""
