"""Image processors of multimodal models: from a decoded image to tensors for the tower and text for the prompt.

Each family is one file with a `declare` function, which reads the checkpoint's settings and returns a `Processor`. The
results equal those of transformers' processors with the PIL back end. Needs only numpy and Pillow.
"""
