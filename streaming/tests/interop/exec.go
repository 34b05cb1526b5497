package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/client-go/util/exec"
)

const large = 32 << 20

type executorFor func(u *url.URL) (remotecommand.Executor, error)

type execer struct {
	base     *url.URL
	executor executorFor
}

func spdyExecutor(config *rest.Config, base *url.URL) execer {
	return execer{base, func(u *url.URL) (remotecommand.Executor, error) {
		return remotecommand.NewSPDYExecutor(config, "POST", u)
	}}
}

func websocketExecutor(config *rest.Config, base *url.URL) execer {
	return execer{base, func(u *url.URL) (remotecommand.Executor, error) {
		return remotecommand.NewWebSocketExecutor(config, "GET", u.String())
	}}
}

// run executes a command with the streams that options has.
func (e execer) run(options remotecommand.StreamOptions, command ...string) error {
	query := url.Values{"command": command}
	for name, set := range map[string]bool{
		"input":  options.Stdin != nil,
		"output": options.Stdout != nil,
		"error":  options.Stderr != nil,
		"tty":    options.Tty,
	} {
		if set {
			query.Set(name, "1")
		}
	}
	u := *e.base
	u.Path = "/exec/default/pod/container"
	u.RawQuery = query.Encode()
	executor, err := e.executor(&u)
	if err != nil {
		return err
	}
	return executor.StreamWithContext(context.Background(), options)
}

func execCases(e execer) []testCase {
	return []testCase{
		{"output and error output are apart", func() error {
			var stdout, stderr bytes.Buffer
			err := e.run(remotecommand.StreamOptions{Stdout: &stdout, Stderr: &stderr}, "both")
			if err != nil {
				return err
			}
			if stdout.String() != "to stdout" || stderr.String() != "to stderr" {
				return fmt.Errorf("got %q and %q", stdout.String(), stderr.String())
			}
			return nil
		}},
		{"exit codes", func() error {
			for _, code := range []int{0, 1, 3, 126, 127, 137, 143, 255} {
				if err := expectExit(e, code); err != nil {
					return err
				}
			}
			return nil
		}},
		{"failure to start has its message", func() error {
			err := e.run(remotecommand.StreamOptions{Stdout: io.Discard}, "fail")
			return expectMessage(err, "no such command")
		}},
		{"a handler's panic is a failure", func() error {
			err := e.run(remotecommand.StreamOptions{Stdout: io.Discard}, "panic")
			return expectMessage(err, "session handler failed")
		}},
		{"stdin comes back", func() error {
			for _, text := range []string{"", "x", "hello\n", strings.Repeat("line\n", 100_000)} {
				var stdout bytes.Buffer
				err := e.run(remotecommand.StreamOptions{
					Stdin: strings.NewReader(text), Stdout: &stdout, Stderr: io.Discard,
				}, "cat")
				if err != nil {
					return err
				}
				if stdout.String() != text {
					return fmt.Errorf("sent %d bytes, got %d", len(text), stdout.Len())
				}
			}
			return nil
		}},
		{"large output is whole", func() error {
			return expectEmitted(e, remotecommand.StreamOptions{}, "emit", 0)
		}},
		{"large output survives a slow client", func() error {
			return expectEmitted(e, remotecommand.StreamOptions{}, "emit", 200*time.Microsecond)
		}},
		{"large input is whole", func() error {
			var stdout bytes.Buffer
			err := e.run(remotecommand.StreamOptions{
				Stdin: &patternReader{length: large}, Stdout: &stdout,
			}, "count")
			if err != nil {
				return err
			}
			if got, want := stdout.String(), fmt.Sprintf("%d\n", large); got != want {
				return fmt.Errorf("server counted %q, want %q", got, want)
			}
			return nil
		}},
		{"large input comes back at once", func() error {
			check := &patternWriter{}
			err := e.run(remotecommand.StreamOptions{
				Stdin: &patternReader{length: large}, Stdout: check,
			}, "cat")
			return check.result(err)
		}},
		{"output follows the end of stdin", func() error {
			options := remotecommand.StreamOptions{Stdin: strings.NewReader("input")}
			return expectEmitted(e, options, "drain-then-emit", 0)
		}},
		{"a process that ends before its input", func() error {
			var stdout bytes.Buffer
			err := e.run(remotecommand.StreamOptions{
				Stdin: &patternReader{length: large}, Stdout: &stdout,
			}, "early")
			if err == nil && stdout.String() != "done" {
				err = fmt.Errorf("got %q", stdout.String())
			}
			return err
		}},
		{"terminal sizes", func() error {
			var stdout bytes.Buffer
			sizes := &sizeQueue{{Width: 81, Height: 25}, {Width: 80, Height: 24}}
			err := e.run(remotecommand.StreamOptions{
				Stdin: blockedReader{}, Stdout: &stdout, Tty: true, TerminalSizeQueue: sizes,
			}, "size", "2")
			if err == nil && stdout.String() != "81x25\n80x24\n" {
				err = fmt.Errorf("got %q", stdout.String())
			}
			return err
		}},
		{"terminal without sizes", func() error {
			var stdout bytes.Buffer
			err := e.run(remotecommand.StreamOptions{Stdout: &stdout, Tty: true}, "both")
			if err == nil && stdout.String() != "to stdout" {
				err = fmt.Errorf("got %q", stdout.String())
			}
			return err
		}},
		{"many short sessions", func() error {
			for range 50 {
				if err := expectExit(e, 7); err != nil {
					return err
				}
			}
			return nil
		}},
	}
}

// versionCases covers what kubectl no longer asks for, but older clients do.
func versionCases(config *rest.Config, base *url.URL) []testCase {
	var cases []testCase
	for _, protocol := range []string{
		"v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io",
	} {
		e := execer{base, func(u *url.URL) (remotecommand.Executor, error) {
			transport, upgrader, err := spdy.RoundTripperFor(config)
			if err != nil {
				return nil, err
			}
			return remotecommand.NewSPDYExecutorForProtocols(transport, upgrader, "POST", u, protocol)
		}}
		cases = append(cases, testCase{"spdy " + protocol, func() error { return expectVersion(e, protocol) }})
	}
	for _, protocol := range []string{"v4.channel.k8s.io", "channel.k8s.io"} {
		e := execer{base, func(u *url.URL) (remotecommand.Executor, error) {
			return remotecommand.NewWebSocketExecutorForProtocols(config, "GET", u.String(), protocol)
		}}
		cases = append(cases, testCase{"websocket " + protocol, func() error { return expectVersion(e, protocol) }})
	}
	return cases
}

func expectVersion(e execer, protocol string) error {
	if err := expectEmitted(e, remotecommand.StreamOptions{}, "emit", 0); err != nil {
		return err
	}
	if protocol == "v4.channel.k8s.io" {
		return expectExit(e, 3)
	}
	err := e.run(remotecommand.StreamOptions{Stdout: io.Discard}, "exit", "3")
	if protocol == "channel.k8s.io" {
		// The first version's client returns when the outputs have ended, whether or not it has
		// looked at the error stream by then.
		return nil
	}
	return expectMessage(err, "non-zero exit code: 3")
}

func expectExit(e execer, code int) error {
	err := e.run(remotecommand.StreamOptions{Stdout: io.Discard, Stderr: io.Discard}, "exit", fmt.Sprint(code))
	if code == 0 {
		return err
	}
	var exit exec.CodeExitError
	if !errors.As(err, &exit) || exit.Code != code {
		return fmt.Errorf("want exit code %d, got %v", code, err)
	}
	return nil
}

func expectMessage(err error, text string) error {
	if err == nil || !strings.Contains(err.Error(), text) {
		return fmt.Errorf("want an error with %q, got %v", text, err)
	}
	return nil
}

func expectEmitted(e execer, options remotecommand.StreamOptions, program string, pause time.Duration) error {
	check := &patternWriter{pause: pause}
	options.Stdout = check
	return check.result(e.run(options, program, fmt.Sprint(large)))
}

// pattern is the byte at a position of every generated stream.
func pattern(position int) byte {
	return byte(position ^ position>>8 ^ position>>16)
}

type patternReader struct{ position, length int }

func (r *patternReader) Read(p []byte) (int, error) {
	if r.position == r.length {
		return 0, io.EOF
	}
	n := min(len(p), r.length-r.position)
	for i := range n {
		p[i] = pattern(r.position + i)
	}
	r.position += n
	return n, nil
}

type patternWriter struct {
	position int
	wrong    error
	pause    time.Duration
}

func (w *patternWriter) Write(p []byte) (int, error) {
	time.Sleep(w.pause)
	for i, b := range p {
		if b != pattern(w.position+i) && w.wrong == nil {
			w.wrong = fmt.Errorf("wrong byte at %d", w.position+i)
		}
	}
	w.position += len(p)
	return len(p), nil
}

func (w *patternWriter) result(err error) error {
	if err != nil {
		return err
	}
	if w.wrong == nil && w.position != large {
		w.wrong = fmt.Errorf("got %d bytes of %d", w.position, large)
	}
	return w.wrong
}

// blockedReader is a terminal at which nobody types.
type blockedReader struct{}

func (blockedReader) Read([]byte) (int, error) { select {} }

type sizeQueue []remotecommand.TerminalSize

func (q *sizeQueue) Next() *remotecommand.TerminalSize {
	if len(*q) == 0 {
		return nil
	}
	size := (*q)[0]
	*q = (*q)[1:]
	return &size
}
