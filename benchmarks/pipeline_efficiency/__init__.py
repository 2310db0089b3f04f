"""How close a pipeline of emulated devices comes to its bound, beside torch's own and an even cut."""
