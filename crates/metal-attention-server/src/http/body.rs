//! Reads a request's JSON body, with errors that name the field.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{ApiError, App};

/// A type that a JSON object describes.
pub trait FromJson: Sized {
    /// Reads the parts it knows; unknown fields are passed over.
    fn from_json(json: &Value) -> Result<Self, ApiError>;
}

/// A request's body, read as JSON.
pub struct Json<T>(pub T);

impl<T: FromJson> FromRequest<App> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        check_content_type(request.headers())?;
        let bytes = read(request, app).await?;
        let json: Value =
            serde_json::from_slice(&bytes).map_err(|e| ApiError::invalid(format!("the body is no JSON: {e}")))?;
        if !json.is_object() {
            return Err(ApiError::invalid("the body must be a JSON object"));
        }
        T::from_json(&json).map(Self)
    }
}

/// Reads a `T` out of `json`. An error names the field.
pub fn parse<T: DeserializeOwned>(json: &Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(json).map_err(|error| {
        let path = error.path().to_string();
        let message = error.into_inner().to_string();
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

/// The whole body: within `read_timeout`, and as long as the router's `DefaultBodyLimit` allows.
async fn read(request: Request, app: &App) -> Result<Bytes, ApiError> {
    match tokio::time::timeout(app.options.read_timeout, Bytes::from_request(request, &())).await {
        Err(_) => Err(ApiError::request_timeout()),
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(e)) if e.status() == StatusCode::PAYLOAD_TOO_LARGE => Err(ApiError::too_large(app.options.max_body)),
        Ok(Err(_)) => Err(ApiError::invalid("the body could not be read to its end")),
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
        let error = parse::<Outer>(&json!({"list": [{"n": 1}, {"n": 256}]})).unwrap_err();
        let body = serde_json::to_value(error.body()).unwrap();
        assert_eq!(body["error"]["param"], "list[1].n");
        assert_eq!(body["error"]["message"], "list[1].n: invalid value: integer `256`, expected u8");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        let missing = serde_json::to_value(parse::<Outer>(&json!({})).unwrap_err().body()).unwrap();
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
}
