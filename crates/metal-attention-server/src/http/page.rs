//! The web page at `/`: a chat in the browser, built from `web/` into `page/` of this crate, or the files of a folder.

use std::borrow::Cow;
use std::io::Read;
use std::path::{Path, PathBuf};

use axum::http::header::{
    ACCEPT, ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG,
    IF_NONE_MATCH, REFERRER_POLICY, VARY, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use percent_encoding::percent_decode_str;

use super::{ApiError, App, ollama, run_blocking};

/// Content security policy of the built-in page: only files of this server and pictures that the page has read itself (`blob:`), no
/// inline script or style.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; \
    font-src 'self'; worker-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Bytes of the largest file of a folder that is served.
const MAX_FILE: u64 = 64 << 20;

/// What is at `/`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Page {
    /// The chat.
    #[default]
    BuiltIn,
    /// The files of a folder, with its `index.html` at `/`.
    Folder(PathBuf),
    /// Nothing.
    None,
}

/// A file of the built-in page.
struct File {
    /// Its path below `/`.
    path: &'static str,
    etag: &'static str,
    /// Whether `bytes` are compressed.
    is_gzip: bool,
    bytes: &'static [u8],
}

/// The files, by path.
static FILES: &[File] = include!(concat!(env!("OUT_DIR"), "/page_files.rs"));

/// Answers a request of a path that no interface has with a file of the page; `None`: there is none.
///
/// At `/` a client that does not accept HTML gets the text of ollama's `/`, by which ollama's clients detect a running server.
pub async fn file(app: &App, method: &Method, path: &str, headers: &HeaderMap) -> Option<Response> {
    if !matches!(*method, Method::GET | Method::HEAD) {
        return None;
    }
    if path == "/" && (app.options.page == Page::None || !accepts(headers, &ACCEPT, "text/html")) {
        return Some(ollama::RUNNING.into_response());
    }
    match &app.options.page {
        Page::BuiltIn => built_in(path, headers),
        Page::Folder(folder) => of_folder(app, folder, path).await,
        Page::None => None,
    }
}

/// Whether a header of the request contains `value`.
fn accepts(headers: &HeaderMap, name: &HeaderName, value: &str) -> bool {
    headers.get(name).and_then(|header| header.to_str().ok()).is_some_and(|header| header.contains(value))
}

/// The response with a file of the built-in page; `None`: there is no such file.
fn built_in(path: &str, headers: &HeaderMap) -> Option<Response> {
    let path = path.strip_prefix('/')?;
    let path = if path.is_empty() { "index.html" } else { path };
    let file = &FILES[FILES.binary_search_by_key(&path, |file| file.path).ok()?];
    // The names of these files contain a hash of their contents.
    let cached = if path.starts_with("assets/") { "public, max-age=31536000, immutable" } else { "no-cache" };
    let mut response = if headers.get(IF_NONE_MATCH).is_some_and(|known| known == file.etag) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        let (encoding, bytes) = encoded(file, accepts(headers, &ACCEPT_ENCODING, "gzip"));
        let encoding = encoding.map(|encoding| [(CONTENT_ENCODING, encoding)]);
        ([(CONTENT_TYPE, content_type(path))], encoding, bytes).into_response()
    };
    let of_all = [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, cached),
        (ETAG, file.etag),
        (VARY, "Accept-Encoding"),
    ];
    response.headers_mut().extend(of_all.map(|(name, value)| (name, HeaderValue::from_static(value))));
    Some(response)
}

/// The bytes of a file and their encoding. `takes_gzip`: the client does.
fn encoded(file: &File, takes_gzip: bool) -> (Option<&'static str>, Cow<'static, [u8]>) {
    match (file.is_gzip, takes_gzip) {
        (false, _) => (None, Cow::Borrowed(file.bytes)),
        (true, true) => (Some("gzip"), Cow::Borrowed(file.bytes)),
        (true, false) => {
            let mut bytes = Vec::new();
            // The bytes were compressed when this library was built.
            let _ = flate2::read::GzDecoder::new(file.bytes).read_to_end(&mut bytes);
            (None, Cow::Owned(bytes))
        }
    }
}

/// The response with a file of a folder; `None`: there is no such file.
async fn of_folder(app: &App, folder: &Path, path: &str) -> Option<Response> {
    let file = path_in(folder, path)?;
    let kind = content_type(file.to_str()?);
    let read = move |_: &App| {
        let length =
            |file: &Path| std::fs::metadata(file).ok().filter(std::fs::Metadata::is_file).map(|data| data.len());
        let Some(length) = length(&file) else { return Ok(None) };
        if length > MAX_FILE {
            return Err(ApiError::internal(format!("{} has more than {} MiB", file.display(), MAX_FILE >> 20)));
        }
        Ok(std::fs::read(&file).ok())
    };
    match run_blocking(app, read).await {
        Ok(bytes) => Some(([(CONTENT_TYPE, kind), (CACHE_CONTROL, "no-cache")], bytes?).into_response()),
        Err(error) => Some(error.into_response()),
    }
}

/// The file at a path of a request; a path to a folder stands for its `index.html`. `None`: the path leads out of `folder`, or to a
/// hidden file.
fn path_in(folder: &Path, path: &str) -> Option<PathBuf> {
    let path = percent_decode_str(path.strip_prefix('/')?).decode_utf8().ok()?;
    let mut file = folder.to_owned();
    let mut parts = path.split('/').peekable();
    while let Some(part) = parts.next() {
        let is_last = parts.peek().is_none();
        let part = if is_last && part.is_empty() { "index.html" } else { part };
        if part.is_empty() || part.starts_with('.') || part.contains(['\\', ':', '\0']) {
            return None;
        }
        file.push(part);
    }
    Some(file)
}

/// The type of a file's contents, by its name.
fn content_type(path: &str) -> &'static str {
    match path.rsplit_once('.').map_or("", |(_, extension)| extension) {
        "html" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" | "map" => "application/json",
        "webmanifest" => "application/manifest+json",
        "txt" | "md" => "text/plain; charset=utf-8",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "webp" => "image/webp",
        "ico" => "image/x-icon",
        "woff2" => "font/woff2",
        "wasm" => "application/wasm",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_in_the_folder() {
        let of = |path: &str| path_in(Path::new("/page"), path).map(|file| file.to_str().unwrap().to_owned());
        assert_eq!(of("/").as_deref(), Some("/page/index.html"));
        assert_eq!(of("/a/").as_deref(), Some("/page/a/index.html"));
        assert_eq!(of("/a%20b/c.js").as_deref(), Some("/page/a b/c.js"));
        for path in
            ["", "a", "/../x", "/a/../x", "/%2e%2e/x", "/a//x", "/.git/x", "/a%2f..%2fx", "/c:x", "/a\\x", "/%00"]
        {
            assert_eq!(of(path), None, "{path}");
        }
    }

    #[test]
    fn the_built_in_page_is_small_and_complete() {
        let file = |path: &str| FILES.iter().find(|file| file.path == path).unwrap_or_else(|| panic!("{path}"));
        let text = |file: &File| String::from_utf8(encoded(file, false).1.into_owned()).unwrap();
        assert!(FILES.is_sorted_by_key(|file| file.path));
        assert!(FILES.iter().all(|file| content_type(file.path) != "application/octet-stream"));
        let index = text(file("index.html"));
        // What the first view loads.
        let first = FILES.iter().filter(|file| file.path == "index.html" || index.contains(file.path));
        let bytes: usize = first.map(|file| file.bytes.len()).sum();
        assert!(bytes > 10_000 && bytes < 150_000, "{bytes} bytes");
    }
}
