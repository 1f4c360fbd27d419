//! HTTP requests to the hub. The token is only sent to the hub's own origin.

use std::time::Duration;

use serde::Deserialize;
use ureq::http::header::{CONTENT_LENGTH, ETAG, LOCATION, RANGE};
use ureq::http::{HeaderMap, Response};
use ureq::{Agent, Body};

use crate::HubError;
use crate::checksum::Checksum;
use crate::environment::{Environment, HubToken};
use crate::origin::{Origin, encoded, redirected};

/// The time without data after which a request fails.
const SILENCE: Duration = Duration::from_secs(30);
/// Maximum redirects of a request.
const MAX_REDIRECTS: usize = 10;
/// Maximum bytes of a file list; those of the largest repositories have a few MiB.
const MAX_LIST: u64 = 32 << 20;

/// A client of one hub.
pub(crate) struct HubClient {
    /// Sends requests.
    agent: Agent,
    /// The hub's address.
    endpoint: String,
    /// The hub's origin, which alone receives the token.
    origin: Origin,
    /// The access token; `None`: anonymous requests.
    token: Option<HubToken>,
}

/// The hub's description of a repository.
pub(crate) struct Listing {
    /// The hash of the newest commit, 40 hexadecimal digits.
    pub commit: String,
    /// Its files.
    pub files: Vec<Listed>,
}

/// The hub's description of a file. It is verified when the file is downloaded.
pub(crate) struct Listed {
    /// Its name in the repository, `/` between folders.
    pub name: String,
    /// Its size; `None`: the list lacks it.
    pub bytes: Option<u64>,
    /// Its checksum; `None`: the list lacks it.
    pub checksum: Option<Checksum>,
}

/// A response, with the origin of the server that sent it.
pub(crate) struct HubResponse {
    /// The response.
    pub response: Response<Body>,
    /// The origin of the server.
    pub from: Origin,
}

impl HubResponse {
    pub fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        header(self.response.headers(), name)
    }

    /// The length of the body in the header.
    pub fn content_length(&self) -> Option<u64> {
        self.header(CONTENT_LENGTH.as_str())?.parse().ok()
    }
}

impl HubClient {
    /// A client of the hub at the environment's endpoint.
    pub fn new(environment: &Environment) -> Result<Self, HubError> {
        let endpoint = environment.endpoint.clone();
        let origin = Origin::of(&endpoint).ok_or_else(|| HubError::Environment {
            name: "HF_ENDPOINT",
            problem: "it is no address such as https://huggingface.co".into(),
        })?;
        let config = Agent::config_builder()
            .user_agent(concat!("metal-attention/", env!("CARGO_PKG_VERSION")))
            // Ranges of a compressed body could not be joined.
            .accept_encoding("identity")
            .http_status_as_error(false)
            // Redirects are followed in `request`, which drops the token for other origins.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .build();
        Ok(Self { agent: config.into(), endpoint, origin, token: environment.token.clone() })
    }

    /// Requests the newest commit of a repository and its files.
    pub fn list(&self, repo: &str) -> Result<Listing, HubError> {
        let url = format!("{}/api/models/{repo}/revision/main?blobs=true", self.endpoint);
        let mut answer = self.get(&url, None)?;
        if answer.status() != 200 {
            return Err(self.refusal(&answer, repo, None));
        }
        let nonsense = |problem| HubError::Answer { host: answer.from.to_string(), problem };
        let body = answer.response.body_mut().with_config().limit(MAX_LIST);
        let info: RepoInfo = body.read_json().map_err(|e| nonsense(e.to_string()))?;
        // The hash becomes the name of a folder.
        if !is_commit(&info.sha) {
            return Err(nonsense("the commit is no hash".into()));
        }
        Ok(Listing { commit: info.sha, files: info.siblings.into_iter().map(Listed::from).collect() })
    }

    /// Requests the size and checksum of a file, for hubs whose lists lack them.
    pub fn look_up(&self, repo: &str, commit: &str, file: &str) -> Result<Listed, HubError> {
        let url = self.file_url(repo, commit, file);
        // The hub's own response has the headers, also if it is a redirect to the storage.
        let answer = self.request(&url, None, HttpMethod::Head)?;
        if !(200..400).contains(&answer.status()) {
            return Err(self.refusal(&answer, repo, Some(file)));
        }
        let etag = answer.header("x-linked-etag").or_else(|| answer.header(ETAG.as_str()));
        let size = answer.header("x-linked-size").and_then(|size| size.parse().ok());
        let length = || answer.content_length().filter(|_| answer.status() == 200);
        Ok(Listed { name: file.to_owned(), bytes: size.or_else(length), checksum: etag.and_then(Checksum::parse) })
    }

    /// Requests the bytes of a file from `start` on. The server may send the whole file instead (status 200).
    pub fn file(&self, repo: &str, commit: &str, file: &str, start: u64) -> Result<HubResponse, HubError> {
        self.get(&self.file_url(repo, commit, file), (start > 0).then_some(start))
    }

    /// The error of an unsuccessful response.
    pub fn refusal(&self, answer: &HubResponse, repo: &str, file: Option<&str>) -> HubError {
        let host = || answer.from.to_string();
        let repo = repo.to_owned();
        let with_token = self.token.is_some();
        let code = answer.header("x-error-code").unwrap_or_default();
        match (answer.status(), file) {
            // Storage servers do not report errors of repositories.
            (status, _) if self.is_elsewhere(answer) => HubError::Status { host: host(), status },
            (401 | 403, _) if code == "GatedRepo" || answer.status() == 403 => {
                HubError::Gated { page: format!("{}/{repo}", self.endpoint), repo, with_token }
            }
            (401, _) if with_token => HubError::TokenRefused { repo, host: host() },
            (401, _) => HubError::TokenNeeded { repo, host: host() },
            (404, Some(file)) if code != "RepoNotFound" => {
                HubError::NoSuchFile { repo, host: host(), file: file.to_owned() }
            }
            (404, _) => HubError::NoSuchRepo { repo, host: host() },
            (status, _) => HubError::Status { host: host(), status },
        }
    }

    /// Whether another server than the hub sent the response.
    pub fn is_elsewhere(&self, answer: &HubResponse) -> bool {
        answer.from != self.origin
    }

    fn file_url(&self, repo: &str, commit: &str, file: &str) -> String {
        format!("{}/{repo}/resolve/{commit}/{}", self.endpoint, encoded(file))
    }

    fn get(&self, url: &str, start: Option<u64>) -> Result<HubResponse, HubError> {
        self.request(url, start, HttpMethod::Get)
    }

    /// Sends a request and follows redirects. `Head` follows them within the hub only.
    fn request(&self, url: &str, start: Option<u64>, method: HttpMethod) -> Result<HubResponse, HubError> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let from = Origin::of(&url).expect("addresses are checked where they come from");
            let mut request = match method {
                HttpMethod::Get => self.agent.get(&url),
                HttpMethod::Head => self.agent.head(&url),
            };
            if let Some(token) = &self.token
                && from == self.origin
            {
                request = request.header("authorization", token.header());
            }
            if let Some(start) = start {
                request = request.header(RANGE, format!("bytes={start}-"));
            }
            let connection = |source| HubError::Connection { host: from.to_string(), source: Box::new(source) };
            let response = request.call().map_err(connection)?;
            let answer = HubResponse { response, from };
            tracing::debug!("status {} from {}", answer.status(), answer.from);
            let (301 | 302 | 303 | 307 | 308, Some(location)) = (answer.status(), answer.header(LOCATION.as_str()))
            else {
                return Ok(answer);
            };
            let nonsense = || HubError::Answer {
                host: answer.from.to_string(),
                problem: "it redirects to where no request can go".into(),
            };
            let next = redirected(&url, location).ok_or_else(nonsense)?;
            if matches!(method, HttpMethod::Head) && Origin::of(&next).as_ref() != Some(&self.origin) {
                return Ok(answer);
            }
            url = next;
        }
        Err(HubError::Answer { host: self.origin.to_string(), problem: "it redirects without end".into() })
    }
}

#[derive(Clone, Copy)]
enum HttpMethod {
    Get,
    Head,
}

/// Whether `text` is the hash of a commit.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// The fields of a repository description that are read here.
#[derive(Deserialize)]
struct RepoInfo {
    /// The hash of the newest commit.
    sha: String,
    /// The files.
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    /// The name, `/` between folders.
    rfilename: String,
    /// The size.
    size: Option<u64>,
    /// Git's hash of the file, or of the pointer to a large file.
    blob_id: Option<String>,
    /// The description of a large file.
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    /// The SHA-256.
    sha256: String,
    /// The size.
    size: Option<u64>,
}

impl From<Sibling> for Listed {
    fn from(file: Sibling) -> Self {
        // For a large file, git has only a pointer; `blob_id` is the pointer's.
        let (bytes, checksum) = match file.lfs {
            Some(lfs) => (lfs.size.or(file.size), Some(lfs.sha256)),
            None => (file.size, file.blob_id),
        };
        Self { name: file.rfilename, bytes, checksum: checksum.as_deref().and_then(Checksum::parse) }
    }
}
