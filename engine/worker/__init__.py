"""The worker: the request table, and execution of step plans on the device."""
