"""What a serving process asks of Python's garbage collector."""

import gc


def freeze_heap() -> None:
    """Takes what lives now out of every later collection. For a process that has started and ends with its engine: one
    that makes another would keep what the first left in cycles.

    After the imports of torch, transformers and Ray some 300,000 objects live; one collection of all of them holds
    every request up, 0.2 s on a slow core, and finds nothing, as modules, models and programs live as long as the
    process. What dies among them by its reference count is still freed at once; a cycle among them is not.
    """
    gc.collect()  # cycles that start-up left would be kept for good
    gc.freeze()
