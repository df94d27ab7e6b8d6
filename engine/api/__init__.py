"""Messages, configuration and errors that the gateway and the engine share. Does not import torch."""
