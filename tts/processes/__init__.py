"""The processes of one server.

    tts.serve: supervisor ──starts, restarts──▶ engine        the model; EngineServer
                          └─starts, restarts──▶ front end …   gRPC on one port; RemoteEngineClient

A child gets its launch order on standard input and tells on standard output when it is ready. Its
input stays open as long as the supervisor lives: the end of it ends the child.
"""
