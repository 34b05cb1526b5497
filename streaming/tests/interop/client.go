// Command interop runs client-go's streaming clients against the server of the Rust
// test that started it: interop SUITE HOST:PORT.
package main

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"time"

	"k8s.io/client-go/rest"
)

// A case that takes longer hangs: the largest moves tens of MiB over loopback.
const caseTimeout = 90 * time.Second

type testCase struct {
	name string
	run  func() error
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: interop SUITE HOST:PORT")
		os.Exit(2)
	}
	suite, host := os.Args[1], os.Args[2]
	config := &rest.Config{Host: "http://" + host}
	base := &url.URL{Scheme: "http", Host: host}

	var cases []testCase
	switch suite {
	case "spdy":
		cases = execCases(spdyExecutor(config, base))
	case "websocket":
		cases = execCases(websocketExecutor(config, base))
	case "versions":
		cases = versionCases(config, base)
	case "forward-spdy":
		cases = forwardCases(spdyDialer(config, base))
	case "forward-tunnel":
		cases = forwardCases(tunnelDialer(config, base))
	default:
		fmt.Fprintf(os.Stderr, "unknown suite %q\n", suite)
		os.Exit(2)
	}

	failed := false
	for _, c := range cases {
		start := time.Now()
		if err := withTimeout(c.run); err != nil {
			failed = true
			fmt.Printf("FAIL %s: %v\n", c.name, err)
			continue
		}
		fmt.Printf("ok %s %v\n", c.name, time.Since(start).Round(time.Millisecond))
	}
	if failed {
		os.Exit(1)
	}
}

func withTimeout(run func() error) error {
	done := make(chan error, 1)
	go func() { done <- run() }()
	select {
	case err := <-done:
		return err
	case <-time.After(caseTimeout):
		return errors.New("timed out")
	}
}
