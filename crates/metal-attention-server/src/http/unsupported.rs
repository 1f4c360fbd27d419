//! Fields that other servers support and this one does not. A request that uses one is refused rather than answered as
//! if the field were absent.
//!
//! A field is refused only with a value that has an effect elsewhere: null, false and empty values never have one, nor
//! do the neutral values listed with the field. Fields that do not change the result (`user`, `metadata`, ...) are
//! ignored and reported in the header `x-ignored`. Each interface has a table of both.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::ApiError;
use super::body::Object;
use super::notes::Notes;

/// A field that is refused.
#[derive(Debug, PartialEq)]
pub struct RefusedField {
    /// The field's name.
    pub name: &'static str,
    /// Values without effect, in addition to null, false and empty ones.
    pub neutral: &'static [Neutral],
    /// A replacement, for the error.
    pub instead: &'static str,
}

/// Returns a row of an interface's table of refused fields.
pub const fn refused(name: &'static str, neutral: &'static [Neutral], instead: &'static str) -> RefusedField {
    RefusedField { name, neutral, instead }
}

/// A value without effect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Neutral {
    /// True; then false has an effect.
    True,
    /// A number.
    Number(f64),
    /// All negative numbers.
    Negative,
    /// A string, a list of only this string, or an object with it as `type`.
    Word(&'static str),
}

use Neutral::{Negative, Number, True, Word};

/// Refuses a request in which one of the fields `refused` has an effect. Returns notes of those `ignored` fields that
/// would have one.
pub fn check<'a>(
    object: &Object<'_>,
    refused: impl IntoIterator<Item = &'a RefusedField>,
    ignored: &[&str],
) -> Result<Notes, ApiError> {
    let mut notes = Notes::default();
    let refused: Vec<_> = refused.into_iter().collect();
    // A value of a wrong type is reported by the type that reads the field.
    let has_effect = |value, neutral| HasEffect(neutral).deserialize(value).unwrap_or(false);
    for (name, value) in object.fields() {
        if let Some(field) = refused.iter().find(|field| field.name == name) {
            if has_effect(value, field.neutral) {
                let message = format!("{name} is not supported: {}", field.instead);
                return Err(ApiError::field(name, message).with_code("unsupported_parameter"));
            }
        } else if ignored.contains(&name) && has_effect(value, &[]) {
            notes.ignored(name);
        }
    }
    Ok(notes)
}

/// Whether a value has an effect, given the values without one.
#[derive(Clone, Copy)]
struct HasEffect(&'static [Neutral]);

impl HasEffect {
    fn unless(self, neutral: Neutral) -> bool {
        !self.0.contains(&neutral)
    }

    fn has_words(self) -> bool {
        self.0.iter().any(|neutral| matches!(neutral, Word(_)))
    }
}

impl<'de> DeserializeSeed<'de> for HasEffect {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<bool, D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for HasEffect {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_bool<E>(self, value: bool) -> Result<bool, E> {
        // Where true has no effect, false has one.
        Ok(value == self.unless(True))
    }

    fn visit_f64<E>(self, value: f64) -> Result<bool, E> {
        Ok(self.unless(Number(value)) && (value >= 0.0 || self.unless(Negative)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<bool, E> {
        self.visit_f64(value as f64)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<bool, E> {
        self.visit_f64(value as f64)
    }

    fn visit_str<E>(self, value: &str) -> Result<bool, E> {
        Ok(!value.is_empty() && !self.0.iter().any(|neutral| matches!(neutral, Word(word) if *word == value)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<bool, A::Error> {
        let mut has_effect = false;
        while let Some(one) = list.next_element_seed(self)? {
            has_effect |= one || !self.has_words();
        }
        Ok(has_effect)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut has_effect = false;
        while let Some(name) = map.next_key::<String>()? {
            has_effect |= map.next_value_seed(self)? || name != "type" || !self.has_words();
        }
        Ok(has_effect)
    }
}
