// Command kube-dev is the development control plane in one binary: etcd and
// the Kubernetes components at one version, chosen by the first argument. It
// exists because container registries and release downloads cannot be assumed
// where the dev cluster and CI run, while Go modules can.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/component-base/version"
	kubectlcmd "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// components maps a subcommand to the constructor of the upstream command.
var components = map[string]func() *cobra.Command{
	"apiserver":          apiserver.NewAPIServerCommand,
	"controller-manager": controllermanager.NewControllerManagerCommand,
	"scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":            func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	name := ""
	if len(os.Args) > 1 {
		name = os.Args[1]
	}
	// Each component parses os.Args itself and expects its own name first.
	os.Args = append([]string{"kube-" + name}, os.Args[min(2, len(os.Args)):]...)

	switch name {
	case "etcd":
		os.Args[0] = "etcd"
		etcdmain.Main(os.Args)
	case "kubectl":
		os.Args[0] = "kubectl"
		if err := cli.RunNoErrOutput(kubectlcmd.NewDefaultKubectlCommand()); err != nil {
			kubectlutil.CheckErr(err)
		}
	case "version":
		fmt.Println(version.Get().GitVersion)
	default:
		construct, ok := components[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "usage: kube-dev %s [flags]\n", strings.Join(subcommands(), "|"))
			os.Exit(2)
		}
		os.Exit(cli.Run(construct()))
	}
}

func subcommands() []string {
	names := []string{"etcd", "kubectl", "version"}
	for name := range components {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
