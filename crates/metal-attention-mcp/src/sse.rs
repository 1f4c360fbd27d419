//! Reads server-sent events (HTML standard, "Parsing an event stream"). Only their data is used by MCP.

use std::io::{BufRead, BufReader, Read};

use crate::limits::MAX_MESSAGE;

/// A reader of server-sent events.
pub struct SseReader<R>(BufReader<R>);

/// The reason why there is no next event or line.
#[derive(Debug)]
pub enum StreamEnd {
    /// The stream is over, or broke.
    Ended,
    /// The event or line is longer than the limit.
    TooLong,
}

impl<R: Read> SseReader<R> {
    /// Reads events from `reader`.
    pub fn new(reader: R) -> Self {
        Self(BufReader::new(reader))
    }

    /// Returns the data of the next event with data.
    pub fn next(&mut self) -> Result<Vec<u8>, StreamEnd> {
        let mut data: Option<Vec<u8>> = None;
        loop {
            let line = read_line(&mut self.0, MAX_MESSAGE)?;
            if line.is_empty() {
                match data.take() {
                    Some(data) => return Ok(data),
                    None => continue,
                }
            }
            let Some(value) = line.strip_prefix(b"data:").or((line == b"data").then_some(b"")) else { continue };
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match &mut data {
                None => data = Some(value.to_vec()),
                Some(data) if data.len() + value.len() >= MAX_MESSAGE => return Err(StreamEnd::TooLong),
                Some(data) => {
                    data.push(b'\n');
                    data.extend_from_slice(value);
                }
            }
        }
    }
}

/// Reads a line of at most `most` bytes, without its line break. A last line without a line break is incomplete and
/// dropped.
pub fn read_line(reader: &mut impl BufRead, most: usize) -> Result<Vec<u8>, StreamEnd> {
    let mut line = Vec::new();
    let read = reader.take(most as u64 + 2).read_until(b'\n', &mut line);
    if read.is_err() || line.is_empty() {
        return Err(StreamEnd::Ended);
    }
    if line.pop_if(|last| *last == b'\n').is_none() {
        return Err(if line.len() > most { StreamEnd::TooLong } else { StreamEnd::Ended });
    }
    line.pop_if(|last| *last == b'\r');
    if line.len() > most { Err(StreamEnd::TooLong) } else { Ok(line) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_have_data() {
        let text = ": comment\r\n\r\nevent: message\r\nid: 1\r\ndata: {\"a\":\r\ndata:1}\r\n\r\n\ndata\n\ndata: lost";
        let mut events = SseReader::new(text.as_bytes());
        assert_eq!(events.next().unwrap(), b"{\"a\":\n1}");
        assert_eq!(events.next().unwrap(), b"");
        assert!(matches!(events.next(), Err(StreamEnd::Ended)));
    }

    #[test]
    fn no_event_is_longer_than_a_message() {
        let endless = || b"data: ".chain(std::io::repeat(b'a'));
        assert!(matches!(SseReader::new(endless()).next(), Err(StreamEnd::TooLong)));
        let lines = format!("data: {}\n", "a".repeat(1 << 20)).repeat(5);
        assert!(matches!(SseReader::new(lines.as_bytes()).next(), Err(StreamEnd::TooLong)));
    }

    #[test]
    fn lines_have_a_limit() {
        assert_eq!(read_line(&mut &b"abc\r\n"[..], 3).unwrap(), b"abc");
        assert!(matches!(read_line(&mut &b"abcd\n"[..], 3), Err(StreamEnd::TooLong)));
        assert!(matches!(read_line(&mut &b"abcdef"[..], 3), Err(StreamEnd::TooLong)));
        assert!(matches!(read_line(&mut &b"abc"[..], 3), Err(StreamEnd::Ended)));
    }
}
