//! Kubernetes remote-command and port-forward server: SPDY/3.1 and WebSocket, one transport-blind session.
