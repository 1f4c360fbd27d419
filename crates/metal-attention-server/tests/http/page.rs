//! The page at `/`, a folder in its place, and no page.

use std::io::Read;

use metal_attention_server::http::{HttpOptions, Page};

use crate::client::{Answer, Server};
use crate::server;

const HTML: &str = "Accept: text/html,application/xhtml+xml";

fn get(server: &Server, path: &str, headers: &[&str]) -> Answer {
    server.send("GET", path, headers, b"")
}

/// The value of a header.
fn header<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    answer.headers.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[test]
fn the_page_has_its_files() {
    let server = server();
    let index = get(&server, "/", &[HTML]);
    assert_eq!((index.status, header(&index, "content-type")), (200, Some("text/html; charset=utf-8")));
    assert_eq!(header(&index, "cache-control"), Some("no-cache"));
    assert!(header(&index, "content-security-policy").unwrap().starts_with("default-src 'none'; script-src 'self'"));
    assert!(index.body.contains("<html"), "{index:?}");
    // Clients that look for ollama.
    assert_eq!(get(&server, "/", &[]).body, "Ollama is running");
    // Every file that the index names is there, for ever.
    let names = index.body.split(['"', '\'']).filter(|name| name.contains("assets/"));
    let mut n = 0;
    for name in names {
        let path = format!("/{}", name.trim_start_matches(['.', '/']));
        let file = get(&server, &path, &[]);
        assert_eq!((file.status, header(&file, "content-encoding")), (200, None), "{path}");
        assert_eq!(header(&file, "cache-control"), Some("public, max-age=31536000, immutable"), "{path}");
        n += 1;
    }
    assert!(n >= 2, "{n} files");
    let etag = header(&index, "etag").unwrap();
    let again = get(&server, "/", &[HTML, &format!("If-None-Match: {etag}")]);
    assert_eq!((again.status, &again.body[..]), (304, ""));
    for path in ["/assets/../index.html", "/assets", "/nothing.js", "/index.html/"] {
        assert_eq!(get(&server, path, &[HTML]).status, 404, "{path}");
    }
    assert_eq!(server.send("POST", "/", &[HTML], b"").status, 404);
}

#[test]
fn the_page_is_compressed_for_clients_that_take_it() {
    let server = server();
    let manifest = get(&server, "/manifest.webmanifest", &[]);
    assert_eq!(header(&manifest, "content-type"), Some("application/manifest+json"));
    let index = get(&server, "/", &[HTML]);
    let script = index.body.split('"').find(|name| name.contains("assets/")).unwrap();
    let path = format!("/{}", script.trim_start_matches(['.', '/']));
    let plain = get(&server, &path, &[]);
    let mut stream = server.send_only("GET", &path, &["Accept-Encoding: br, gzip"], b"");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let head_end = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
    let head = String::from_utf8_lossy(&bytes[..head_end]);
    assert!(head.contains("content-encoding: gzip") && head.contains("vary: Accept-Encoding"), "{head}");
    assert!(2 * (bytes.len() - head_end) < plain.body.len());
}

#[test]
fn a_folder_takes_the_place_of_the_page() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("index.html"), "<html>mine</html>").unwrap();
    std::fs::create_dir(folder.path().join("js")).unwrap();
    std::fs::write(folder.path().join("js/app.mjs"), "let a;").unwrap();
    let page = Page::Folder(folder.path().to_owned());
    let server = Server::new(HttpOptions { page, ..Default::default() });
    assert_eq!(get(&server, "/", &[HTML]).body, "<html>mine</html>");
    let script = get(&server, "/js/app.mjs", &[]);
    assert_eq!((&script.body[..], header(&script, "content-type")), ("let a;", Some("text/javascript; charset=utf-8")));
    for path in ["/js", "/js/", "/../x", "/%2e%2e/x", "/manifest.webmanifest"] {
        assert_eq!(get(&server, path, &[HTML]).status, 404, "{path}");
    }
    assert_eq!(get(&server, "/health", &[]).status, 200);
}

#[test]
fn there_may_be_no_page() {
    let server = Server::new(HttpOptions { page: Page::None, ..Default::default() });
    assert_eq!(get(&server, "/", &[HTML]).body, "Ollama is running");
    assert_eq!(get(&server, "/index.html", &[HTML]).status, 404);
}
