//! `/openapi.json`: the OpenAPI 3.1 description, generated from the types that read requests and write responses. Their
//! doc comments are its descriptions.

use utoipa::ToSchema;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ContentBuilder, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr, Response, ResponseBuilder, Schema,
};

use super::dialect::Dialect;
use super::error::ErrorBody;
use super::{HttpOptions, anthropic, llama_cpp, ollama};

/// Implements the schema of a request that is read as several types, as `allOf` of theirs.
macro_rules! all_of {
    ($name:ident, $($part:ident),+) => {
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                let parts = utoipa::openapi::schema::AllOfBuilder::new();
                $(let parts = parts.item(utoipa::openapi::Ref::from_schema_name(<$part as utoipa::ToSchema>::name()));)+
                parts.into()
            }
        }

        impl utoipa::ToSchema for $name {
            fn schemas(schemas: &mut Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::Schema>)>) {
                $(
                    let name = <$part as utoipa::ToSchema>::name().into_owned();
                    schemas.push((name, <$part as utoipa::PartialSchema>::schema()));
                    <$part as utoipa::ToSchema>::schemas(schemas);
                )+
            }
        }
    };
}
pub(crate) use all_of;

/// The empty description, to which the routes are added.
pub fn base() -> OpenApi {
    let info = InfoBuilder::new()
        .title("metal-attention")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some("Language models over HTTP, as OpenAI's interface has it."));
    OpenApiBuilder::new().info(info.build()).build()
}

/// Adds the errors and the API key to all operations.
pub fn complete(mut api: OpenApi, options: &HttpOptions, checks_host: bool) -> OpenApi {
    let components = api.components.get_or_insert_default();
    components.schemas.extend(schemas::<ErrorBody>());
    components.schemas.extend(schemas::<anthropic::ErrorBody>());
    components.schemas.extend(schemas::<ollama::ErrorBody>());
    components.schemas.extend(schemas::<llama_cpp::ErrorBody>());
    let requires_key = !options.keys.is_empty();
    if requires_key {
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        components.security_schemes.insert("key".into(), RefOr::T(SecurityScheme::Http(bearer)));
    }
    for (path, item) in &mut api.paths.paths {
        let is_open = OPEN_PATHS.contains(&path.as_str()) || options.open_metrics && path == "/metrics";
        let error_body = error_body(Dialect::of_path(path));
        let add_error = |operation: &mut Operation, status, description| {
            add_error(operation, status, description, error_body.clone());
        };
        for (operation, is_post) in operations(item) {
            add_error(operation, "500", "A defect of the server");
            if checks_host {
                add_error(operation, "403", "The Host header does not name this machine");
            }
            if requires_key && !is_open {
                add_error(operation, "401", "No key, or a wrong one");
                operation.security = Some(vec![SecurityRequirement::new("key", Vec::<String>::new())]);
            }
            if is_post {
                add_error(operation, "400", "The request is wrong");
                add_error(operation, "404", "There is no such model");
                add_error(operation, "408", "The request's body did not arrive in time");
                add_error(operation, "413", "The request's body is too long");
                add_error(operation, "503", "The model is loading, or the server shuts down");
                add_error(operation, "429", "Too many requests wait already");
                add_error(operation, "504", "The request took too long");
            }
            if path.contains('{') {
                add_error(operation, "400", "The path is no UTF-8");
                add_error(operation, "404", "There is no such model");
            }
        }
    }
    api
}

/// Paths that never need an API key.
pub const OPEN_PATHS: [&str; 4] = ["/health", "/v1/health", "/ready", "/openapi.json"];

/// The operations of a path, each with whether its request has a body.
fn operations(item: &mut PathItem) -> impl Iterator<Item = (&mut Operation, bool)> {
    let get = item.get.iter_mut().map(|operation| (operation, false));
    let delete = item.delete.iter_mut().map(|operation| (operation, false));
    get.chain(delete).chain(item.post.iter_mut().map(|operation| (operation, true)))
}

/// The schema of `T` and all schemas that it refers to, by name.
fn schemas<T: ToSchema>() -> Vec<(String, RefOr<Schema>)> {
    let mut schemas = vec![(T::name().into_owned(), T::schema())];
    T::schemas(&mut schemas);
    schemas
}

/// A reference to the schema of an interface's errors.
fn error_body(dialect: Dialect) -> Ref {
    Ref::from_schema_name(match dialect {
        Dialect::OpenAi => ErrorBody::name(),
        Dialect::Anthropic => anthropic::ErrorBody::name(),
        Dialect::Ollama => ollama::ErrorBody::name(),
        Dialect::LlamaCpp => llama_cpp::ErrorBody::name(),
    })
}

fn add_error(operation: &mut Operation, status: &str, description: &str, body: Ref) {
    let content = ContentBuilder::new().schema(Some(body)).build();
    let response: Response =
        ResponseBuilder::new().description(description).content("application/json", content).build();
    operation.responses.responses.entry(status.to_owned()).or_insert(RefOr::T(response));
}
