"""What a run reads: text or tokens on disk -> a memory-mapped token file -> samples -> batches in an order that any number of ranks agrees on.

`sources` yields documents, `tokenizer` turns them into numbers, `tokens` keeps those in a file, `samples` cuts or packs them into sequences, `shuffle` is
the order, `batches` hands each rank its share. Only `batches` imports torch. The embedded text is Shakespeare's Romeo and Juliet (1597, public domain).
"""
