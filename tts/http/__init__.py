"""HTTP: OpenAI's API for speech and text on the service, with the calls, limits and errors of gRPC.

    connection ─▶ application (Starlette: routes) ─▶ Endpoint: token, limits, body ─▶ handler
    bounds, times                                    CallTracker, AccessControl
                                                    SessionEndpoint: the same for WebSockets

A group of routes is one module with a function `routes`, which `app` lists.
"""
