"""What runs PyTorch: the only package that imports torch and transformers, and only when it is used (extra ``train``).

`scope` says what can be measured and needs no torch; `models` builds a family's modules from its configuration, `program` puts one rank's wrappers,
optimizer and step around them, `stages` cuts them into a pipeline, `tracker` counts bytes and messages, `probe` measures a run.
"""
