"""Tools that compile kernels ahead of time, time and tune them; serving uses none of these."""
