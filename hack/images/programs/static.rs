//! The only file of the `scratch-static` image: a program that gives tests a
//! process to look at where there is no shell, no libc and no `/etc`.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "\
usage: static sleep [SECONDS]    sleep, for ever without SECONDS
       static print TEXT...      print the words
       static cat                copy stdin to stdout
       static exit CODE          end with CODE
       static serve PORT         answer HTTP requests on PORT with `ok`
";

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    match run(&args) {
        Ok(code) => code,
        Err(error) => {
            // Nobody is left to tell when this fails.
            drop(writeln!(io::stderr(), "static: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[OsString]) -> io::Result<ExitCode> {
    let words: Vec<&str> = args.iter().map(|arg| arg.to_str().unwrap_or("?")).collect();
    match words.as_slice() {
        ["sleep"] => loop {
            std::thread::park();
        },
        ["sleep", seconds] => {
            std::thread::sleep(Duration::from_secs(number(seconds)?.into()));
        }
        ["print", text @ ..] => writeln!(io::stdout(), "{}", text.join(" "))?,
        ["cat"] => {
            io::copy(&mut io::stdin(), &mut io::stdout())?;
        }
        ["exit", code] => {
            let code = u8::try_from(number(code)?).map_err(io::Error::other)?;
            return Ok(ExitCode::from(code));
        }
        ["serve", port] => serve(u16::try_from(number(port)?).map_err(io::Error::other)?)?,
        _ => return Err(io::Error::other(USAGE)),
    }
    Ok(ExitCode::SUCCESS)
}

fn number(text: &str) -> io::Result<u32> {
    text.parse()
        .map_err(|error| io::Error::other(format!("{text:?}: {error}")))
}

fn serve(port: u16) -> io::Result<()> {
    const PATIENCE: Duration = Duration::from_secs(5);
    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n";

    let listener = TcpListener::bind(("0.0.0.0", port))?;
    writeln!(io::stdout(), "serving on {port}")?;
    for stream in listener.incoming() {
        let mut stream = stream?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        // One peer's trouble is no reason to stop for the others.
        let mut request = [0; 4096];
        if stream.read(&mut request).is_ok() {
            drop(stream.write_all(ANSWER));
        }
    }
    Ok(())
}
