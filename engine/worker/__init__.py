"""The worker: the table of running requests, and a step's plan turned into tokens on the device."""
