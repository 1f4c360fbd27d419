//! The models that are served.

mod loaded;

use std::ops::Deref;
use std::sync::Arc;

pub use loaded::{LoadError, Loaded};

use super::notes::Notes;

/// A model in use. It stays loaded as long as this lives.
#[derive(Clone)]
pub struct ModelLease {
    loaded: Arc<Loaded>,
    /// The name that the request has for it; empty where it has none.
    asked: String,
    /// The model's own names, the main one first.
    names: Arc<[String]>,
}

impl Deref for ModelLease {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        &self.loaded
    }
}

impl ModelLease {
    /// `loaded`, which has `names` and is called `asked`.
    pub fn new(loaded: Arc<Loaded>, names: Arc<[String]>, asked: Option<&str>) -> Self {
        Self { loaded, asked: asked.unwrap_or_default().to_owned(), names }
    }

    /// The model's main name.
    pub fn main_name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// The name that an answer has: the request's, else the model's own. `notes` say which model it is where the request
    /// has a name that is not the model's.
    pub fn answer_name(&self, notes: &mut Notes) -> String {
        if self.asked.is_empty() {
            return self.main_name().to_owned();
        }
        if !self.names.contains(&self.asked) {
            notes.answered_by(self.main_name());
        }
        self.asked.clone()
    }
}
