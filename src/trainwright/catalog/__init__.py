"""What exists: models, GPUs, links, prices, as data files with a source in every row."""
