//! Reads a request's JSON body, with errors that name the field.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use futures_util::StreamExt;
use serde::de::DeserializeOwned;

use super::connections::Connection;
use super::peer::Peer;
use super::work::Weight;
use super::{ApiError, App, HttpOptions, limits};

/// Bytes of a body that count for nothing: connections are few enough for so many each.
const FREE: usize = 64 << 10;

/// A type that a JSON object describes.
pub trait FromJson: Sized {
    /// Reads the parts it knows; unknown fields are passed over.
    fn from_json(json: &[u8]) -> Result<Self, ApiError>;
}

/// A request's body, read as JSON. It counts as held by the server as long as this lives.
pub struct Json<T> {
    request: T,
    /// Who asks.
    pub peer: Peer,
    /// How much work it is.
    pub weight: Weight,
    _held: Held,
}

impl<T> Deref for Json<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.request
    }
}

impl<T: FromJson + Send + 'static> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        check_content_type(request.headers())?;
        let peer = *request.extensions().get::<Peer>().ok_or_else(|| ApiError::internal("a request of nobody"))?;
        let connection = request.extensions().get::<Arc<Connection>>().cloned();
        let mut held = app.bodies.hold(peer);
        if let Some(connection) = &connection {
            connection.waits_for_body();
        }
        let body = read(request.into_body(), &app.options, &mut held).await?;
        if let Some(connection) = &connection {
            connection.waits_for_answer();
        }
        let n = body.len();
        let parse = move || {
            let schema_values = limits::check(&body)?;
            let weight = Weight::new(n, schema_values);
            Ok(Self { request: T::from_json(&body)?, peer, weight, _held: held })
        };
        app.work.run(peer, Weight::new(n, 0), parse).await
    }
}

/// Reads a `T` out of `json`. An error names the field.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(json);
    serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        let mut message = inner.to_string();
        // The place in the body helps nobody who did not write it by hand.
        if let Some(at) = message.rfind(&format!(" at line {} column {}", inner.line(), inner.column())) {
            message.truncate(at);
        }
        if path == "." { ApiError::invalid(message) } else { ApiError::field(&path, format!("{path}: {message}")) }
    })
}

/// A page elsewhere can make a browser send other types without asking this server first.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let value = headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let essence = value.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::invalid(format!("the Content-Type must be application/json, not {essence:?}")))
}

/// The whole body: within `read_timeout`, not longer than `max_body`, and as long as `held` may grow.
async fn read(body: Body, options: &HttpOptions, held: &mut Held) -> Result<Vec<u8>, ApiError> {
    let most = options.max_body;
    if body.size_hint().lower() > most as u64 {
        return Err(ApiError::too_large(most));
    }
    let collect = async {
        let mut bytes = Vec::new();
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| ApiError::invalid("the body could not be read to its end"))?;
            if chunk.len() > most - bytes.len() {
                return Err(ApiError::too_large(most));
            }
            bytes.extend_from_slice(&chunk);
            held.grow(bytes.len())?;
        }
        Ok(bytes)
    };
    tokio::time::timeout(options.read_timeout, collect)
        .await
        .unwrap_or_else(|_| Err(ApiError::request_timeout(options.read_timeout)))
}

/// The bodies of all requests that are being read or worked on.
pub struct Bodies {
    /// Most bytes of all of them.
    all: usize,
    /// Most bytes of one client's.
    each: usize,
    held: Mutex<HashMap<Peer, usize>>,
}

impl Bodies {
    /// At most `all` bytes, and of one client half of that. A single body of `max_body` has room in any case.
    pub fn new(all: usize, max_body: usize) -> Arc<Self> {
        Arc::new(Self { all: all.max(max_body), each: (all / 2).max(max_body), held: Mutex::default() })
    }

    /// A body of `peer`, of which nothing has arrived yet.
    fn hold(self: &Arc<Self>, peer: Peer) -> Held {
        Held { bodies: Arc::clone(self), peer, bytes: 0 }
    }

    /// Bytes that are held now.
    pub fn bytes(&self) -> usize {
        self.held().values().sum()
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Peer, usize>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A body's part of what may be held, given back when this is dropped.
struct Held {
    bodies: Arc<Bodies>,
    peer: Peer,
    /// Bytes that count.
    bytes: usize,
}

impl Held {
    /// The body has `len` bytes by now. An error where there is no room for them.
    fn grow(&mut self, len: usize) -> Result<(), ApiError> {
        let more = len.saturating_sub(FREE).saturating_sub(self.bytes);
        if more == 0 {
            return Ok(());
        }
        let Bodies { all, each, .. } = *self.bodies;
        let mut held = self.bodies.held();
        let of_all: usize = held.values().sum();
        let of_peer = held.get(&self.peer).copied().unwrap_or(0);
        if of_all + more > all || of_peer + more > each {
            return Err(ApiError::too_many_bodies(all, each));
        }
        held.insert(self.peer, of_peer + more);
        self.bytes += more;
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut held = self.bodies.held();
        let left = held.get(&self.peer).copied().unwrap_or(0).saturating_sub(self.bytes);
        if left == 0 {
            held.remove(&self.peer);
        } else {
            held.insert(self.peer, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Inner {
        #[allow(dead_code)]
        n: u8,
    }

    #[derive(Debug, Deserialize)]
    struct Outer {
        #[allow(dead_code)]
        list: Vec<Inner>,
    }

    #[test]
    fn errors_name_the_field() {
        let error = parse::<Outer>(br#"{"list": [{"n": 1}, {"n": 256}]}"#).unwrap_err();
        let body = serde_json::to_value(error.body()).unwrap();
        assert_eq!(body["error"]["param"], "list[1].n");
        assert_eq!(body["error"]["message"], "list[1].n: invalid value: integer `256`, expected u8");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        let missing = serde_json::to_value(parse::<Outer>(b"{}").unwrap_err().body()).unwrap();
        assert_eq!(
            missing,
            json!({"error": {"message": "missing field `list`", "type": "invalid_request_error",
            "param": null, "code": null}})
        );
    }

    #[test]
    fn only_json_is_read() {
        let check = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, value.parse().unwrap());
            check_content_type(&headers).is_ok()
        };
        assert!(check("application/json") && check("Application/JSON; charset=utf-8"));
        assert!(!check("text/plain") && !check("application/jsonx") && !check(""));
        assert!(check_content_type(&HeaderMap::new()).is_err());
    }

    #[test]
    fn bodies_share_one_budget() {
        let peer = |n: u8| Peer::at([10, 0, 0, n].into());
        let bodies = Bodies::new(1000, 100);
        let hold = |n: u8, len: usize| {
            let mut held = bodies.hold(peer(n));
            held.grow(FREE + len / 2).and_then(|()| held.grow(FREE + len)).map(|()| held)
        };
        let (one, two) = (hold(1, 400).unwrap(), hold(1, 100).unwrap());
        assert!(hold(1, 1).is_err(), "one client has half");
        let other = hold(2, 450).unwrap();
        assert!(hold(3, 51).is_err(), "there is no more than all");
        assert!(hold(3, 50).is_ok() && hold(1, 0).is_ok());
        drop((one, other));
        assert!(hold(2, 500).is_ok());
        drop(two);
        assert!(bodies.held().is_empty());
        assert!(Bodies::new(10, 1000).hold(peer(1)).grow(FREE + 1000).is_ok(), "one body has room");
    }
}
