"""A trained model is used elsewhere with a model card and a Modelfile, and through the hub."""
