//! The time that a model stays loaded after its last request, as requests, the configuration and the command line set
//! it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// The time that a model stays loaded after its last request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepAlive {
    /// Until the server ends, or its memory is needed for another model.
    Forever,
    /// This long; zero: it is unloaded when its requests are answered.
    For(Duration),
}

/// The error of a text that is no duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no time: expected seconds, or numbers with s, m or h as in 1h30m; -1: for ever")]
pub struct NoTime(String);

impl KeepAlive {
    fn of_seconds(seconds: f64) -> Self {
        /// About thirty years: no server runs as long.
        const LONGEST: f64 = 1e9;
        if (0.0..LONGEST).contains(&seconds) { Self::For(Duration::from_secs_f64(seconds)) } else { Self::Forever }
    }
}

impl FromStr for KeepAlive {
    type Err = NoTime;

    /// Parses a number of seconds, or numbers with units as in Go's durations: `1h30m`. Negative: for ever.
    fn from_str(text: &str) -> Result<Self, NoTime> {
        read(text.trim()).ok_or_else(|| NoTime(text.to_owned()))
    }
}

/// Parses a duration, see [`KeepAlive::from_str`]; `None`: invalid.
fn read(text: &str) -> Option<KeepAlive> {
    let number = |text: &str| text.parse().ok().filter(|number: &f64| number.is_finite());
    if let Some(seconds) = number(text) {
        return Some(KeepAlive::of_seconds(seconds));
    }
    let is_negative = text.starts_with('-');
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (value, more) = rest.split_at(digits);
        let length = more.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(more.len());
        let (unit, more) = more.split_at(length);
        seconds += number(value)? * seconds_of(unit)?;
        rest = more;
    }
    let is_empty = text.len() == usize::from(text.starts_with(['-', '+']));
    (!is_empty).then(|| KeepAlive::of_seconds(if is_negative { -seconds } else { seconds }))
}

/// The seconds of a unit of Go's durations; `None`: no unit.
fn seconds_of(unit: &str) -> Option<f64> {
    Some(match unit {
        "ns" => 1e-9,
        "us" | "\u{b5}s" | "\u{3bc}s" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    })
}

impl<'de> Deserialize<'de> for KeepAlive {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KeepAliveVisitor)
    }
}

struct KeepAliveVisitor;

impl Visitor<'_> for KeepAliveVisitor {
    type Value = KeepAlive;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of seconds, or a duration such as \"5m\" or \"1h30m\"; below 0: for ever")
    }

    fn visit_i64<E: Error>(self, seconds: i64) -> Result<KeepAlive, E> {
        Ok(KeepAlive::of_seconds(seconds as f64))
    }

    fn visit_u64<E: Error>(self, seconds: u64) -> Result<KeepAlive, E> {
        Ok(KeepAlive::of_seconds(seconds as f64))
    }

    fn visit_f64<E: Error>(self, seconds: f64) -> Result<KeepAlive, E> {
        Ok(KeepAlive::of_seconds(seconds))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<KeepAlive, E> {
        text.parse().map_err(E::custom)
    }
}

impl PartialSchema for KeepAlive {
    fn schema() -> RefOr<Schema> {
        let types = SchemaType::from_iter([Type::Number, Type::String]);
        let what = "Seconds, or a duration such as `5m`; below 0: for ever.";
        ObjectBuilder::new().schema_type(types).description(Some(what)).into()
    }
}

impl ToSchema for KeepAlive {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_seconds_or_as_go_has_them() {
        let read = |json: &str| serde_json::from_str::<KeepAlive>(json).ok();
        let seconds = |seconds: f64| Some(KeepAlive::For(Duration::from_secs_f64(seconds)));
        for (json, expected) in [
            ("300", seconds(300.0)),
            ("0", seconds(0.0)),
            ("1.5", seconds(1.5)),
            ("-1", Some(KeepAlive::Forever)),
            ("-0.5", Some(KeepAlive::Forever)),
            ("1000000000", Some(KeepAlive::Forever)),
            ("1e300", Some(KeepAlive::Forever)),
            (r#""5m""#, seconds(300.0)),
            (r#""1h30m""#, seconds(5400.0)),
            (r#""1.5h""#, seconds(5400.0)),
            (r#""24h""#, seconds(86400.0)),
            (r#""250ms""#, seconds(0.25)),
            (r#""0s""#, seconds(0.0)),
            (r#""-1m""#, Some(KeepAlive::Forever)),
            (r#""300""#, seconds(300.0)),
            (r#""-1""#, Some(KeepAlive::Forever)),
            (r#""0""#, seconds(0.0)),
        ] {
            assert_eq!(read(json), expected, "{json}");
        }
        for wrong in ["soon", "", "-", "5", "5x", "m5", "1h30", "5 m", "1..5s", "inf", "nan", "--1m"] {
            let is_number = wrong == "5";
            assert_eq!(read(&format!("{wrong:?}")).is_some(), is_number, "{wrong}");
        }
        for wrong in ["true", "[]", "{}"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
