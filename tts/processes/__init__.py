"""Processes of one server.

    tts.serve: supervisor ──starts, restarts──▶ engine        the model; EngineServer
                          └─starts, restarts──▶ front end …   gRPC on one port; RemoteEngineClient

A child reads its launch parameters from standard input and reports on standard output when it is
ready. Its input stays open while the supervisor is alive: at the end of the input the child exits.
"""
