"""hetero_fsdp against an even split under Lightning's own FSDP2, and against every device alone."""
