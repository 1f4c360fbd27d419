//! Reads a request's JSON body into a typed request. Errors name the field.
//!
//! Steps ([`Json`]): check the content type; read the bytes within the limits of [`BodyBudget`]; split the object into
//! its fields once ([`Object`]); check their sizes ([`limits`]); then each type of the interface reads its own fields
//! with [`FromJson`]. All steps after the bytes run on a blocking thread.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_TYPE, ORIGIN};
use futures_util::StreamExt;
use serde::de::value::{MapAccessDeserializer, MapDeserializer};
use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, IntoDeserializer, MapAccess, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::value::RawValue;

use super::connections::ClientConnection;
use super::dialect::Dialect;
use super::limits::{self, MAX_FIELDS};
use super::peer::Peer;
use super::work::WorkSize;
use super::{ApiError, App, HttpOptions};

/// Bytes of each body that are not counted: the number of connections bounds their sum.
const FREE_BYTES: usize = 64 << 10;

/// A request type that is read from a JSON object.
pub trait FromJson: Sized {
    /// Whether it may have pictures.
    const MAY_HAVE_PICTURES: bool = false;

    /// Reads the known fields; unknown ones are ignored.
    fn from_json(object: &Object<'_>) -> Result<Self, ApiError>;

    /// Bytes of its pictures, which count apart from those of the rest of the body.
    fn picture_bytes(&self) -> usize {
        0
    }
}

/// A JSON object, split into its fields. Values stay unparsed until a type reads them.
pub struct Object<'a> {
    /// Names and unparsed values, in the order of the body.
    fields: Vec<(Cow<'a, str>, &'a RawValue)>,
}

impl<'a> Object<'a> {
    /// Splits `json`, which must be one object of at most [`MAX_FIELDS`] fields.
    pub fn split(json: &'a [u8]) -> Result<Self, ApiError> {
        let (mut reader, mut fields) = (serde_json::Deserializer::from_slice(json), Vec::new());
        match reader.deserialize_map(FieldsVisitor(&mut fields)).and_then(|()| reader.end()) {
            Ok(()) => Ok(Self { fields }),
            Err(_) if fields.len() > MAX_FIELDS => Err(ApiError::invalid(format!(
                "the body has more than {MAX_FIELDS} fields, which is the most it may have"
            ))),
            Err(error) if error.is_data() => Err(ApiError::invalid("the body must be a JSON object")),
            Err(error) => Err(ApiError::invalid(format!("the body is no JSON: {error}"))),
        }
    }

    /// The fields in the order of the body.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.fields.iter().map(|(name, value)| (&**name, *value))
    }

    /// The unparsed value of a field. Where the body has the name several times, the last one.
    pub fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.fields().filter(|(known, _)| *known == name).last().map(|(_, value)| value)
    }

    /// Reads the fields of `T`. An error names the field.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        serde_path_to_error::deserialize(self).map_err(|error| field_error(&error.path().to_string(), error.inner()))
    }
}

/// Collects the fields of an object, up to one more than [`MAX_FIELDS`].
struct FieldsVisitor<'f, 'a>(&'f mut Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Visitor<'de> for FieldsVisitor<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((BorrowedName(name), value)) = map.next_entry()? {
            self.0.push((name, value));
            if self.0.len() > MAX_FIELDS {
                return Err(A::Error::custom("too many fields"));
            }
        }
        Ok(())
    }
}

/// A field's name, borrowed unless it has escapes.
#[derive(serde::Deserialize)]
struct BorrowedName<'a>(#[serde(borrow)] Cow<'a, str>);

/// A field's unparsed value.
struct FieldValue<'a>(&'a RawValue);

impl<'de> IntoDeserializer<'de, serde_json::Error> for FieldValue<'de> {
    type Deserializer = &'de RawValue;

    fn into_deserializer(self) -> Self::Deserializer {
        self.0
    }
}

impl<'de> Deserializer<'de> for &Object<'de> {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        let fields = self.fields.iter().map(|(name, value)| (&**name, FieldValue(value)));
        MapDeserializer::new(fields).deserialize_any(visitor)
    }

    /// Passes only the fields that the struct has.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        let fields = self.fields.iter().filter(|(name, _)| known.contains(&&**name));
        MapDeserializer::new(fields.map(|(name, value)| (&**name, FieldValue(value)))).deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// A `T` that must be sent as an object: serde would also accept a list of a struct's fields.
#[derive(Debug, Clone)]
pub struct OnlyObject<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OnlyObject<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(OnlyObjectVisitor(PhantomData))
    }
}

struct OnlyObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for OnlyObjectVisitor<T> {
    type Value = OnlyObject<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<OnlyObject<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(OnlyObject)
    }
}

/// A request that was read from a JSON body. Its body counts against [`BodyBudget`] as long as this lives.
pub struct Json<T> {
    /// The request.
    request: T,
    /// The client's address.
    pub peer: Peer,
    /// The amount of CPU work that the request causes.
    pub work_size: WorkSize,
    /// The body's bytes in the budget.
    _reservation: BodyReservation,
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
        check_content_type(request.headers(), Dialect::of_path(request.uri().path()))?;
        let peer = *request
            .extensions()
            .get::<Peer>()
            .ok_or_else(|| ApiError::internal("the request has no client address"))?;
        let connection = request.extensions().get::<Arc<ClientConnection>>().cloned();
        let mut reserved = app.bodies.reserve(peer);
        if let Some(connection) = &connection {
            connection.waits_for_body();
        }
        let HttpOptions { max_body, pictures, .. } = &app.options;
        let (max_text, max_pictures) = (*max_body, if T::MAY_HAVE_PICTURES { pictures.max_bytes } else { 0 });
        let body =
            read(request.into_body(), max_text.saturating_add(max_pictures), &app.options, &mut reserved).await?;
        if let Some(connection) = &connection {
            connection.waits_for_answer();
        }
        let n = body.len();
        let parse = move || {
            let object = Object::split(&body)?;
            let schema_values = limits::check(&object)?;
            let request = T::from_json(&object)?;
            let n_pictures = request.picture_bytes().min(n);
            if n_pictures > max_pictures {
                return Err(ApiError::too_large_pictures(max_pictures));
            }
            if n - n_pictures > max_text {
                return Err(ApiError::too_large(max_text));
            }
            let work_size = WorkSize::new(n - n_pictures, schema_values);
            Ok(Self { request, peer, work_size, _reservation: reserved })
        };
        app.work.run(peer, WorkSize::new(n, 0), parse).await
    }
}

/// A request whose body may be empty; it then has no fields. A web page of another site can make a browser send an
/// empty body without a CORS preflight, so requests from pages need a body.
pub struct OptionalJson<T>(pub T);

impl<T: FromJson + Clone + Default + Send + 'static> FromRequest<App> for OptionalJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        if request.body().is_end_stream() && !is_from_page(request.headers()) {
            return Ok(Self(T::default()));
        }
        Ok(Self(Json::<T>::from_request(request, app).await?.request.clone()))
    }
}

/// Returns the error of the field at `path`.
fn field_error(path: &str, error: &serde_json::Error) -> ApiError {
    let mut message = error.to_string();
    // The position in the body only helps a person who wrote it by hand.
    if let Some(at) = message.rfind(&format!(" at line {} column {}", error.line(), error.column())) {
        message.truncate(at);
    }
    if path == "." { ApiError::invalid(message) } else { ApiError::field(path, format!("{path}: {message}")) }
}

/// Refuses content types other than JSON: a web page of another site can make a browser send those without a CORS
/// preflight. The paths of ollama also accept what `curl -d` sends, unless a browser sends it, which names the page's
/// origin.
fn check_content_type(headers: &HeaderMap, dialect: Dialect) -> Result<(), ApiError> {
    let value = headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let essence = value.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let is_form = essence.eq_ignore_ascii_case("application/x-www-form-urlencoded");
    if dialect == Dialect::Ollama && is_form && !is_from_page(headers) {
        return Ok(());
    }
    Err(ApiError::invalid(format!("the Content-Type must be application/json, not {essence:?}")))
}

/// Whether a browser sends the request for a web page.
fn is_from_page(headers: &HeaderMap) -> bool {
    headers.contains_key(ORIGIN) || headers.keys().any(|name| name.as_str().starts_with("sec-fetch-"))
}

/// Reads the whole body. Fails after `read_timeout`, beyond `max` bytes, or where `reserved` cannot grow.
async fn read(
    body: Body,
    max: usize,
    options: &HttpOptions,
    reserved: &mut BodyReservation,
) -> Result<Vec<u8>, ApiError> {
    if body.size_hint().lower() > max as u64 {
        return Err(ApiError::too_large(max));
    }
    let collect = async {
        let mut bytes = Vec::new();
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| ApiError::invalid("the body could not be read to its end"))?;
            if chunk.len() > max - bytes.len() {
                return Err(ApiError::too_large(max));
            }
            bytes.extend_from_slice(&chunk);
            reserved.grow(bytes.len())?;
        }
        Ok(bytes)
    };
    tokio::time::timeout(options.read_timeout, collect)
        .await
        .unwrap_or_else(|_| Err(ApiError::request_timeout(options.read_timeout)))
}

/// The memory that request bodies occupy, from their first byte until their request is answered.
pub struct BodyBudget {
    /// Maximum bytes of all bodies.
    max_total: usize,
    /// Maximum bytes of the bodies of one client.
    max_per_client: usize,
    /// Bytes by client.
    reserved: Mutex<HashMap<Peer, usize>>,
}

impl BodyBudget {
    /// A budget of `max_total` bytes, half of which one client may use. A single body of `max_body` bytes always fits.
    pub fn new(max_total: usize, max_body: usize) -> Arc<Self> {
        Arc::new(Self {
            max_total: max_total.max(max_body),
            max_per_client: (max_total / 2).max(max_body),
            reserved: Mutex::default(),
        })
    }

    /// Returns a reservation of no bytes for a body of `peer`.
    fn reserve(self: &Arc<Self>, peer: Peer) -> BodyReservation {
        BodyReservation { bodies: Arc::clone(self), peer, bytes: 0 }
    }

    /// Bytes that bodies occupy now.
    pub fn bytes(&self) -> usize {
        self.reserved().values().sum()
    }

    fn reserved(&self) -> MutexGuard<'_, HashMap<Peer, usize>> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The bytes of one body in the budget. Dropping it releases them.
struct BodyReservation {
    /// The budget.
    bodies: Arc<BodyBudget>,
    /// The client.
    peer: Peer,
    /// Bytes that count, without the first [`FREE_BYTES`].
    bytes: usize,
}

impl BodyReservation {
    /// Grows the reservation to a body of `len` bytes. Fails, without a change, where that exceeds the budget.
    fn grow(&mut self, len: usize) -> Result<(), ApiError> {
        let growth = len.saturating_sub(FREE_BYTES).saturating_sub(self.bytes);
        if growth == 0 {
            return Ok(());
        }
        let BodyBudget { max_total, max_per_client, .. } = *self.bodies;
        let mut reserved = self.bodies.reserved();
        let of_all: usize = reserved.values().sum();
        let of_peer = reserved.get(&self.peer).copied().unwrap_or(0);
        if of_all + growth > max_total || of_peer + growth > max_per_client {
            return Err(ApiError::too_many_bodies(max_total, max_per_client));
        }
        reserved.insert(self.peer, of_peer + growth);
        self.bytes += growth;
        Ok(())
    }
}

impl Drop for BodyReservation {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut reserved = self.bodies.reserved();
        let left = reserved.get(&self.peer).copied().unwrap_or(0).saturating_sub(self.bytes);
        if left == 0 {
            reserved.remove(&self.peer);
        } else {
            reserved.insert(self.peer, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;
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
        let parse = |json: &str| Object::split(json.as_bytes()).unwrap().parse::<Outer>();
        let error = parse(r#"{"list": [{"n": 1}, {"n": 256}]}"#).unwrap_err();
        let body = serde_json::to_value(error.body()).unwrap();
        assert_eq!(body["error"]["param"], "list[1].n");
        assert_eq!(body["error"]["message"], "list[1].n: invalid value: integer `256`, expected u8");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        let missing = serde_json::to_value(parse("{}").unwrap_err().body()).unwrap();
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
            check_content_type(&headers, Dialect::OpenAi).is_ok()
        };
        assert!(check("application/json") && check("Application/JSON; charset=utf-8"));
        assert!(!check("text/plain") && !check("application/jsonx") && !check(""));
        assert!(!check("application/x-www-form-urlencoded"));
        assert!(check_content_type(&HeaderMap::new(), Dialect::Ollama).is_err());
    }

    #[test]
    fn ollama_paths_accept_form_bodies_from_curl_but_not_from_pages() {
        let check = |kind: &str, growth: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, kind.parse().unwrap());
            headers.extend(growth.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())));
            check_content_type(&headers, Dialect::Ollama).is_ok()
        };
        assert!(check("application/x-www-form-urlencoded", &[]) && check("application/json", &[("origin", "null")]));
        assert!(!check("text/plain", &[]) && !check("multipart/form-data", &[]));
        assert!(!check("application/x-www-form-urlencoded", &[("origin", "null")]));
        assert!(!check("application/x-www-form-urlencoded", &[("sec-fetch-site", "cross-site")]));
    }

    #[test]
    fn bodies_share_one_budget() {
        let peer = |n: u8| Peer::at([10, 0, 0, n].into());
        let bodies = BodyBudget::new(1000, 100);
        let reserve = |n: u8, len: usize| {
            let mut reserved = bodies.reserve(peer(n));
            reserved.grow(FREE_BYTES + len / 2).and_then(|()| reserved.grow(FREE_BYTES + len)).map(|()| reserved)
        };
        let (one, two) = (reserve(1, 400).unwrap(), reserve(1, 100).unwrap());
        assert!(reserve(1, 1).is_err(), "one client has half");
        let other = reserve(2, 450).unwrap();
        assert!(reserve(3, 51).is_err(), "there is no more than all");
        assert!(reserve(3, 50).is_ok() && reserve(1, 0).is_ok());
        drop((one, other));
        assert!(reserve(2, 500).is_ok());
        drop(two);
        assert!(bodies.reserved().is_empty());
        assert!(BodyBudget::new(10, 1000).reserve(peer(1)).grow(FREE_BYTES + 1000).is_ok(), "one body has room");
    }
}
