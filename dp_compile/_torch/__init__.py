"""The private-torch boundary: only `_torch/` imports private torch names. All other modules import them from here.

| file          | contents                                        | import cost                   |
|---------------|-------------------------------------------------|-------------------------------|
| `autograd`    | engine entry, tensor versions, dispatch modes   | none                          |
| `compiler`    | Dynamo state, readable before Dynamo is loaded  | none                          |
| `distributed` | process groups, stores, torch's DDP             | none                          |
| `dynamo`      | compiled autograd, Dynamo, tracing              | Dynamo, 1 s                   |
| `inductor`    | compilers, lowerings                            | Dynamo and Inductor, 2 to 3 s |

Importing a file raises UnsupportedTorchError if the installed torch lacks a name that it needs.
"""
