//! The field for stop strings, with its limits.

use std::fmt;

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use utoipa::ToSchema;

use crate::http::limits::{MAX_STOP_BYTES, MAX_STOP_BYTES_IN_ALL, MAX_STOP_STRINGS};

/// One stop string or several.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Stop {
    /// One string.
    One(String),
    /// Any of several.
    Several(Vec<String>),
}

impl Stop {
    /// All stop strings.
    pub fn into_strings(self) -> Vec<String> {
        match self {
            Self::One(string) => vec![string],
            Self::Several(strings) => strings,
        }
    }
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StopVisitor)
    }
}

struct StopVisitor;

impl<'de> Visitor<'de> for StopVisitor {
    type Value = Stop;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of strings")
    }

    fn visit_str<E: Error>(self, string: &str) -> Result<Stop, E> {
        check_stop(string)?;
        Ok(Stop::One(string.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Stop, A::Error> {
        let (mut strings, mut bytes) = (Vec::new(), 0);
        while let Some(string) = list.next_element::<String>()? {
            if strings.len() == MAX_STOP_STRINGS {
                return Err(Error::custom(format!("more than {MAX_STOP_STRINGS} strings, which is the most allowed")));
            }
            check_stop(&string)?;
            bytes += string.len();
            if bytes > MAX_STOP_BYTES_IN_ALL {
                let message = format!("more than {MAX_STOP_BYTES_IN_ALL} bytes together, which is the most allowed");
                return Err(Error::custom(message));
            }
            strings.push(string);
        }
        Ok(Stop::Several(strings))
    }
}

fn check_stop<E: Error>(string: &str) -> Result<(), E> {
    match string.len() {
        0..=MAX_STOP_BYTES => Ok(()),
        n => Err(E::custom(format!("a string of {n} bytes; at most {MAX_STOP_BYTES} are allowed"))),
    }
}
