//! Helper: a running `serve` process of the built program, and requests to it.
//!
//! `common::program` -> [`Server`] -> plain HTTP/1.1 requests over TCP.
#![allow(dead_code)] // some platforms compile only a part of the tests that use it

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;

use crate::common::program;

/// A server process on a free port. It is killed on drop.
pub struct Server {
    child: Child,
    /// `host:port`.
    pub address: String,
    /// The lines of stderr up to the one with the address.
    pub startup_log: Vec<String>,
    /// Reads the remaining lines of stderr until the server exits, so that the pipe never fills.
    rest: Option<JoinHandle<Vec<String>>>,
}

impl Server {
    /// Starts `serve` on the CPU with `args` and waits until it listens. Models may still be loading.
    pub fn start(args: &[&str]) -> Self {
        Self::start_in(args, &[])
    }

    /// Like [`start`](Self::start), with environment variables.
    pub fn start_in(args: &[&str], variables: &[(&str, &str)]) -> Self {
        let args = [&["serve", "--device", "cpu", "--port", "0"], args].concat();
        let mut child = program().args(args).envs(variables.iter().copied()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let mut startup_log = Vec::new();
        let address = loop {
            let line = lines.next().unwrap_or_else(|| panic!("the server does not listen: {startup_log:?}"));
            let address = line.strip_prefix("listening on http://").map(str::to_owned);
            startup_log.push(line);
            if let Some(address) = address {
                break address;
            }
        };
        Self { child, address, startup_log, rest: Some(std::thread::spawn(move || lines.collect())) }
    }

    /// Polls `/ready` until the model is loaded.
    pub fn wait_until_ready(&self) {
        while self.status("/ready", "") != 200 {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The status of `GET path`. `header`: further header lines, each with its line break, or empty.
    pub fn status(&self, path: &str, header: &str) -> u16 {
        status(&self.address, path, header)
    }

    /// Sends a request, a GET if there is no body. The response can be read from the returned stream.
    pub fn send_only(&self, path: &str, body: Option<&Value>) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let (address, body) = (&self.address, body.map(Value::to_string));
        let method = if body.is_some() { "POST" } else { "GET" };
        let body = body.unwrap_or_default();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }

    /// Sends a request, a GET if there is no body. Returns the status and the response's JSON.
    pub fn send(&self, path: &str, body: Option<&Value>) -> (u16, Value) {
        let mut answer = String::new();
        self.send_only(path, body).read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap())
    }

    /// Sends a signal by its name without `SIG`, such as `TERM`.
    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }

    /// Waits until the server exits. Returns its exit code and the lines of stderr after the startup log.
    pub fn end(mut self) -> (Option<i32>, Vec<String>) {
        let lines = self.rest.take().unwrap().join().unwrap();
        (self.child.wait().unwrap().code(), lines)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The status of `GET path` at `address`. `header`: further header lines, each with its line break, or empty.
pub fn status(address: &str, path: &str, header: &str) -> u16 {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{header}\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}
