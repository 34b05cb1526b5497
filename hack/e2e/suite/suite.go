// Package suite pins the Kubernetes version whose conformance tests judge the
// node, and what those tests run: the suite itself, the image all its pods use,
// and the runner that must match the suite's own copy of ginkgo.
package suite

import (
	_ "github.com/onsi/ginkgo/v2/ginkgo"
	_ "k8s.io/kubernetes/test/e2e"
	_ "k8s.io/kubernetes/test/images/agnhost"
)
