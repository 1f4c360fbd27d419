//! Downloads from a hub that a server of the tests plays, and the cache.

mod cached;
mod pull;
