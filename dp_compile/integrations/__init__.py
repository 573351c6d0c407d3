"""Frameworks that wrap and compile models themselves. One file for each; nothing is imported before it is asked for.

| file              | what it is for                                                  |
|-------------------|-----------------------------------------------------------------|
| `accelerate.py`   | a subclass of accelerate's `Accelerator`                        |
| `common.py`       | what all of them refuse and choose                              |
| `lightning.py`, `pytorch_lightning.py` | `strategy="dp_compile"` of Lightning's twins           |
| `strategies.py`   | what these two have in common                                   |
| `torchtitan.py`   | a `parallelize_fn` for torchtitan's model specs                 |
| `transformers.py` | a mixin for `Trainer`, which works with accelerate's            |
"""
