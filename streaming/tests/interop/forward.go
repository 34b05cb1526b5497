package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"
)

// Ports of the server: one echoes, one drops its connections, the others refuse.
const (
	echoPort    = 80
	droppedPort = 81
	refusedPort = 82
)

type dialer func() (httpstream.Dialer, error)

func forwardURL(base *url.URL) *url.URL {
	u := *base
	u.Path = "/portForward/default/pod"
	return &u
}

func spdyDialer(config *rest.Config, base *url.URL) dialer {
	return func() (httpstream.Dialer, error) {
		transport, upgrader, err := spdy.RoundTripperFor(config)
		if err != nil {
			return nil, err
		}
		client := &http.Client{Transport: transport}
		return spdy.NewDialerForStreaming(upgrader, client, "POST", forwardURL(base)), nil
	}
}

func tunnelDialer(config *rest.Config, base *url.URL) dialer {
	return func() (httpstream.Dialer, error) {
		return portforward.NewSPDYOverWebsocketDialerForStreaming(forwardURL(base), config)
	}
}

// session is a running port-forward of all three ports.
type session struct {
	stop  chan struct{}
	ended chan error
	local map[uint16]string
}

func forward(dial dialer) (*session, error) {
	d, err := dial()
	if err != nil {
		return nil, err
	}
	s := &session{stop: make(chan struct{}), ended: make(chan error, 1), local: map[uint16]string{}}
	ready := make(chan struct{})
	ports := []string{
		fmt.Sprintf("0:%d", echoPort), fmt.Sprintf("0:%d", droppedPort), fmt.Sprintf("0:%d", refusedPort),
	}
	f, err := portforward.NewOnAddressesForStreaming(
		d, []string{"127.0.0.1"}, ports, s.stop, ready, io.Discard, io.Discard)
	if err != nil {
		return nil, err
	}
	go func() { s.ended <- f.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-s.ended:
		return nil, fmt.Errorf("port-forward ended before it was ready: %w", err)
	}
	forwarded, err := f.GetPorts()
	if err != nil {
		return nil, err
	}
	for _, port := range forwarded {
		s.local[port.Remote] = fmt.Sprintf("127.0.0.1:%d", port.Local)
	}
	return s, nil
}

// echo sends length bytes, ends its side and wants them all back.
func (s *session) echo(length int) error {
	connection, err := net.Dial("tcp", s.local[echoPort])
	if err != nil {
		return err
	}
	defer connection.Close()
	sent, err := io.ReadAll(&patternReader{length: length})
	if err != nil {
		return err
	}
	go func() {
		_, _ = connection.Write(sent)
		_ = connection.(*net.TCPConn).CloseWrite()
	}()
	got, err := io.ReadAll(connection)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, sent) {
		return fmt.Errorf("sent %d bytes, got %d", len(sent), len(got))
	}
	return nil
}

func forwardCases(dial dialer) []testCase {
	with := func(use func(*session) error) func() error {
		return func() error {
			s, err := forward(dial)
			if err != nil {
				return err
			}
			if err := use(s); err != nil {
				return err
			}
			close(s.stop)
			return <-s.ended
		}
	}
	return []testCase{
		{"one connection", with(func(s *session) error { return s.echo(1 << 20) })},
		{"connections side by side", with(func(s *session) error {
			errs := make([]error, 20)
			var wg sync.WaitGroup
			for i := range errs {
				wg.Go(func() { errs[i] = s.echo(256 << 10) })
			}
			wg.Wait()
			return errors.Join(errs...)
		})},
		{"aborted connections leave room for the next", with(func(s *session) error {
			for range 200 {
				connection, err := net.Dial("tcp", s.local[echoPort])
				if err != nil {
					return err
				}
				if _, err := connection.Write(make([]byte, 64<<10)); err != nil {
					return err
				}
				// A reset instead of an orderly end.
				_ = connection.(*net.TCPConn).SetLinger(0)
				_ = connection.Close()
			}
			return s.echo(1 << 10)
		})},
		{"a server that drops connections does not end the session", with(func(s *session) error {
			for range 50 {
				connection, err := net.Dial("tcp", s.local[droppedPort])
				if err != nil {
					return err
				}
				if _, err := connection.Write([]byte("x")); err != nil {
					return err
				}
				if got, err := io.ReadAll(connection); err != nil || len(got) > 0 {
					return fmt.Errorf("got %d bytes, %v", len(got), err)
				}
				_ = connection.Close()
			}
			return s.echo(1 << 10)
		})},
		{"a refused port ends the session with its message", func() error {
			s, err := forward(dial)
			if err != nil {
				return err
			}
			connection, err := net.Dial("tcp", s.local[refusedPort])
			if err != nil {
				return err
			}
			defer connection.Close()
			select {
			case err := <-s.ended:
				return expectMessage(err, "lost connection to pod")
			case <-time.After(caseTimeout / 2):
				return errors.New("session goes on")
			}
		}},
	}
}
