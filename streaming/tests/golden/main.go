// Command golden records what Go's SPDY library sends, for the Rust decoder to replay:
// go run . writes one .bin file for each recording beside itself.
//
// The recordings cover what a Kubernetes client does in an exec session and in a
// port-forward, and every frame type that the library can write.
package main

import (
	"bytes"
	"log"
	"net/http"
	"os"

	"github.com/moby/spdystream/spdy"
)

func main() {
	record("exec", execSession())
	record("forward", forwardSession())
	record("all-types", allTypes())
}

func record(name string, frames []spdy.Frame) {
	var wire bytes.Buffer
	framer, err := spdy.NewFramer(&wire, nil)
	if err != nil {
		log.Fatal(err)
	}
	for _, frame := range frames {
		if err := framer.WriteFrame(frame); err != nil {
			log.Fatalf("%s: %v", name, err)
		}
	}
	if err := os.WriteFile(name+".bin", wire.Bytes(), 0o644); err != nil {
		log.Fatal(err)
	}
}

func syn(stream spdy.StreamId, fields ...string) *spdy.SynStreamFrame {
	headers := http.Header{}
	for i := 0; i < len(fields); i += 2 {
		// The library writes names in the order of a Go map: more than one would make
		// recordings differ from run to run, but not in meaning.
		headers[fields[i]] = []string{fields[i+1]}
	}
	return &spdy.SynStreamFrame{StreamId: stream, Headers: headers}
}

func execSession() []spdy.Frame {
	return []spdy.Frame{
		syn(1, "streamtype", "error"),
		syn(3, "streamtype", "stdin"),
		&spdy.PingFrame{Id: 1},
		syn(5, "streamtype", "stdout"),
		syn(7, "streamtype", "resize"),
		&spdy.DataFrame{StreamId: 7, Data: []byte("{\"Width\":80,\"Height\":24}\n")},
		&spdy.DataFrame{StreamId: 3, Data: bytes.Repeat([]byte("0123456789abcdef"), 512)},
		&spdy.DataFrame{StreamId: 3, Flags: spdy.DataFlagFin},
		&spdy.RstStreamFrame{StreamId: 1, Status: spdy.Cancel},
		&spdy.RstStreamFrame{StreamId: 5, Status: spdy.Cancel},
		&spdy.GoAwayFrame{LastGoodStreamId: 0, Status: spdy.GoAwayOK},
	}
}

func forwardSession() []spdy.Frame {
	var frames []spdy.Frame
	stream := spdy.StreamId(1)
	for _, request := range []string{"0", "1", "2"} {
		frames = append(frames,
			syn(stream, "streamtype", "error", "port", "8080", "requestid", request),
			&spdy.DataFrame{StreamId: stream, Flags: spdy.DataFlagFin},
			syn(stream+2, "streamtype", "data", "port", "8080", "requestid", request),
			&spdy.DataFrame{StreamId: stream + 2, Data: []byte("request " + request)},
		)
		stream += 4
	}
	return frames
}

func allTypes() []spdy.Frame {
	return []spdy.Frame{
		&spdy.SettingsFrame{FlagIdValues: []spdy.SettingsFlagIdValue{{Id: spdy.SettingsInitialWindowSize, Value: 65536}}},
		syn(1, "streamtype", "error"),
		&spdy.HeadersFrame{StreamId: 1, Headers: http.Header{"more": {"one", "two"}}},
		&spdy.SynReplyFrame{StreamId: 2, Headers: http.Header{"reply": {"to nothing"}}},
		&spdy.WindowUpdateFrame{StreamId: 1, DeltaWindowSize: 1024},
		syn(3, "streamtype", "stdin"),
		&spdy.PingFrame{Id: 2},
		&spdy.PingFrame{Id: 3},
	}
}
