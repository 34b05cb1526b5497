//! Wire protocol between a virtual node and its hosts, and how both know each other.
