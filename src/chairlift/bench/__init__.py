"""Measuring: the same load under different settings, and reports of it.

| module       | what it does                                                                    |
|--------------|---------------------------------------------------------------------------------|
| clients      | the load's clients: send requests into the engine, and the next ones on answers  |
| trace        | what happened: requests, slots and KV memory, taken from the engine's records    |
| metrics      | numbers of a trace                                                              |
| lab          | runs a load under a configuration, on a runner that is started once             |
| compare      | one load under each policy                                                      |
| results      | the comparison as plain data (JSON) and as a table                              |
| report       | the comparison as one HTML file                                                 |
| case, cases  | questions about the engine, with a target each: memory, preemption, latency ...  |
| measure      | runs a case                                                                     |
| case_results | a measured case as plain data and as a table                                    |
| case_report  | a measured case as one HTML file                                                |
| timeline     | a trace as an SVG drawing                                                       |
| machine      | what it was measured on                                                         |
"""
