"""Measuring: the same load through different schedulers, and a report of it.

| module   | what it does                                                                   |
|----------|--------------------------------------------------------------------------------|
| clients  | the load's clients: send requests into the engine, and the next ones on answers |
| trace    | what happened: requests, slots and KV memory, taken from the engine's records   |
| metrics  | numbers of a trace                                                             |
| compare  | runs a load under each policy on one runner                                    |
| results  | the comparison as plain data (JSON) and as a table                             |
| timeline | a trace as an SVG drawing                                                      |
| report   | the comparison as one HTML file                                                |
| machine  | what it was measured on                                                        |
"""
