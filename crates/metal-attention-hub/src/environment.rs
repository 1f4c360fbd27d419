//! The environment variables of the hub, which are shared by all programs that use it.

use std::env;
use std::fmt;
use std::path::PathBuf;

use crate::HubError;
use crate::origin::Origin;

/// The values of these variables.
#[derive(Clone, Debug)]
pub struct Environment {
    /// The folder of the shared cache: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else in
    /// `~/.cache/huggingface`.
    pub cache: PathBuf,
    /// The hub's address without a slash at its end: `HF_ENDPOINT`, else `https://huggingface.co`.
    pub endpoint: String,
    /// The access token: `HF_TOKEN`, else the file `token` in `HF_HOME` (or `HF_TOKEN_PATH`).
    pub token: Option<HubToken>,
    /// `HF_HUB_OFFLINE`: no requests are sent.
    pub offline: bool,
}

/// An access token. Its `Debug` output does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct HubToken(String);

impl HubToken {
    /// Reads a token without surrounding white space; `None` if `text` is empty. Characters that no header can contain
    /// are an error, which does not show them. `from`: the variable, for errors.
    pub fn new(text: &str, from: &'static str) -> Result<Option<Self>, HubError> {
        match text.trim() {
            "" => Ok(None),
            text if text.bytes().all(|b| b.is_ascii_graphic()) => Ok(Some(Self(text.to_owned()))),
            _ => {
                Err(HubError::Environment { name: from, problem: "a token has letters, digits and signs only".into() })
            }
        }
    }

    /// The value of the header `Authorization`.
    pub(crate) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for HubToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}

impl Environment {
    /// Reads the variables, and the file with the token.
    pub fn read() -> Result<Self, HubError> {
        Self::from(&|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
    }

    /// Reads the variables with `variable`, for which an empty value counts as unset.
    fn from(variable: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Self, HubError> {
        let text = |name| variable(name).map(|value| value.to_string_lossy().into_owned());
        let home = || {
            let folder =
                variable("HF_HOME").or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")));
            folder.or_else(|| env::home_dir().map(|home| home.join(".cache/huggingface")))
        };
        let in_home = |what| {
            home().map(|home| home.join(what)).ok_or_else(|| HubError::Environment {
                name: "HF_HOME",
                problem: "it is not set, and there is no home folder to use instead".into(),
            })
        };
        let cache = match variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE")) {
            Some(folder) => folder,
            None => in_home("hub")?,
        };
        // The paths of links in the cache are made from this path.
        let cache = std::path::absolute(&cache).map_err(|e| HubError::io("find", &cache, e))?;

        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if Origin::of(&endpoint).is_none() {
            let problem = "it is no address such as https://huggingface.co".into();
            return Err(HubError::Environment { name: "HF_ENDPOINT", problem });
        }

        let named = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
        let token = if let Some(token) = named {
            HubToken::new(&token, "HF_TOKEN")?
        } else {
            let file = variable("HF_TOKEN_PATH").map_or_else(|| in_home("token"), Ok);
            // An unreadable file counts as missing: most models need no token.
            let token = file.ok().and_then(|file| std::fs::read_to_string(file).ok());
            token.map_or(Ok(None), |token| HubToken::new(&token, "HF_TOKEN_PATH"))?
        };

        let offline = text("HF_HUB_OFFLINE").is_some_and(|value| {
            let yes = ["1", "on", "yes", "true"];
            yes.iter().any(|yes| value.eq_ignore_ascii_case(yes))
        });
        Ok(Self { cache, endpoint, token, offline })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Environment, HubError> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name);
        Environment::from(&|name| find(name).map(|(_, value)| PathBuf::from(value)))
    }

    #[test]
    fn the_cache_is_where_other_programs_look_for_it() {
        let cache = |variables: &[(&str, &str)]| read(variables).unwrap().cache;
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x")]), PathBuf::from("/x/huggingface/hub"));
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/h")]), PathBuf::from("/h/hub"));
        assert_eq!(cache(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")]), PathBuf::from("/c"));
        assert!(cache(&[]).ends_with(".cache/huggingface/hub"));
        assert!(cache(&[("HF_HOME", "relative")]).is_absolute());
    }

    #[test]
    fn tokens_come_from_a_variable_or_a_file_and_are_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap();
        assert_eq!(read(&[("HF_HOME", home)]).unwrap().token, None);
        std::fs::write(dir.path().join("token"), "hf_file\n").unwrap();
        let from_file = read(&[("HF_HOME", home)]).unwrap();
        assert_eq!(from_file.token.as_ref().unwrap().header(), "Bearer hf_file");
        let from_variable = read(&[("HF_HOME", home), ("HF_TOKEN", " hf_variable ")]).unwrap();
        assert_eq!(from_variable.token.as_ref().unwrap().header(), "Bearer hf_variable");
        assert!(!format!("{from_file:?} {from_variable:?}").contains("hf_"));
        let error = read(&[("HF_TOKEN", "hf_two\nlines")]).unwrap_err().to_string();
        assert!(error.contains("HF_TOKEN") && !error.contains("hf_two"), "{error}");
    }

    #[test]
    fn the_endpoint_is_an_address() {
        assert_eq!(read(&[]).unwrap().endpoint, "https://huggingface.co");
        assert_eq!(read(&[("HF_ENDPOINT", "http://localhost:80/hub/")]).unwrap().endpoint, "http://localhost:80/hub");
        for bad in ["localhost", "ftp://x", "https://", "https://name:secret@x"] {
            let error = read(&[("HF_ENDPOINT", bad)]).unwrap_err().to_string();
            assert!(error.contains("HF_ENDPOINT") && !error.contains("secret"), "{error}");
        }
        assert!(read(&[("HF_HUB_OFFLINE", "True")]).unwrap().offline);
        assert!(!read(&[("HF_HUB_OFFLINE", "0")]).unwrap().offline);
    }
}
