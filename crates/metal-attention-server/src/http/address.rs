//! The parts of a request's address: its path and its query. They are axum's, but what is wrong with one is an [`ApiError`], in JSON
//! as every other error.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::{ApiError, App};

/// The values after the `?`.
#[derive(Debug)]
pub struct Query<T>(pub T);

impl<T: DeserializeOwned> FromRequestParts<App> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let query = axum::extract::Query::from_request_parts(parts, app).await;
        query.map(|axum::extract::Query(values)| Self(values)).map_err(|error| {
            // "Failed to deserialize query string: FIELD: REASON"; without a field where one is missing.
            let message = error.body_text();
            match message.split(": ").collect::<Vec<_>>()[..] {
                [_, field, _, ..] => ApiError::field(field, &message),
                _ => ApiError::invalid(&message),
            }
        })
    }
}

/// The values of a route's parameters, such as `{id}`.
#[derive(Debug)]
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send> FromRequestParts<App> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let path = axum::extract::Path::from_request_parts(parts, app).await;
        path.map(|axum::extract::Path(values)| Self(values)).map_err(|error| ApiError::invalid(error.body_text()))
    }
}
