"""The HTTP side of a rollout cell: one ASGI app for the OpenAI and the SGLang wire, its server, and held ports.

`app.build_app(client, settings)` needs a `client.EngineClient`; `server.serve(app, socket)` runs it in a thread;
`ports.hold_port` reserves the socket. Nothing is imported here: who only holds a port need not load a web server.
"""
