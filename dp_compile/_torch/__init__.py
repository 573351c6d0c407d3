"""The only door to private torch names, by subject. What a module outside needs, it imports from one of these.

| file          | what comes through it                                              | loading it costs              |
|---------------|--------------------------------------------------------------------|-------------------------------|
| `autograd`    | the engine's entry, versions of tensors, modes                     | nothing                       |
| `compiler`    | questions about Dynamo that have an answer also if it is not there | nothing                       |
| `distributed` | groups, stores, torch's DDP                                        | nothing                       |
| `dynamo`      | compiled autograd, Dynamo, tracing                                 | Dynamo, 1 s                   |
| `inductor`    | compilers, lowerings                                               | Dynamo and Inductor, 2 to 3 s |

A name that the installed torch lacks is one clear error when its file is loaded.
"""
