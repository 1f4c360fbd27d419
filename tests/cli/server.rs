//! A server of the built program, and requests to it.
#![allow(dead_code)] // not every file of tests needs all of it

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;

use crate::common::program;

/// A server on a free port, which is killed when this is dropped.
pub struct Server {
    child: Child,
    pub address: String,
    /// The lines of stderr up to where it listens.
    pub said: Vec<String>,
    /// Reads the rest of them, so that the server can go on writing.
    rest: Option<JoinHandle<Vec<String>>>,
}

impl Server {
    /// Starts `serve` on the CPU with these arguments.
    pub fn start(args: &[&str]) -> Self {
        Self::start_in(args, &[])
    }

    /// The same with these variables of the environment.
    pub fn start_in(args: &[&str], variables: &[(&str, &str)]) -> Self {
        let args = [&["serve", "--device", "cpu", "--port", "0"], args].concat();
        let mut child = program().args(args).envs(variables.iter().copied()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let mut said = Vec::new();
        let address = loop {
            let line = lines.next().unwrap_or_else(|| panic!("the server does not listen: {said:?}"));
            let address = line.strip_prefix("listening on http://").map(str::to_owned);
            said.push(line);
            if let Some(address) = address {
                break address;
            }
        };
        Self { child, address, said, rest: Some(std::thread::spawn(move || lines.collect())) }
    }

    pub fn wait_until_ready(&self) {
        while self.status("/ready", "") != 200 {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The status of `GET path` with this line of the head, or none.
    pub fn status(&self, path: &str, header: &str) -> u16 {
        status(&self.address, path, header)
    }

    /// A request whose answer is yet to be read; without a body it is a GET.
    pub fn begin(&self, path: &str, body: Option<&Value>) -> TcpStream {
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

    /// The status and the answer of a request; without a body it is a GET.
    pub fn send(&self, path: &str, body: Option<&Value>) -> (u16, Value) {
        let mut answer = String::new();
        self.begin(path, body).read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), serde_json::from_str(body).unwrap())
    }

    /// Sends the signal of this name, as `TERM`.
    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }

    /// Waits for the server's end: its exit code and the lines of stderr since it listened.
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

/// The status of `GET path` with this line of the head, or none.
pub fn status(address: &str, path: &str, header: &str) -> u16 {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{header}\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}
