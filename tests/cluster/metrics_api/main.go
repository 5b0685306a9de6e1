// An external metrics API for tests: each metric is the sum of its samples at one URL, in Prometheus' text format. It
// stands for Prometheus with prometheus-adapter.
package main

import (
	"context"
	"fmt"
	"net/http"
	"os"

	"github.com/prometheus/common/expfmt"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-base/logs"
	"k8s.io/klog/v2"
	"k8s.io/metrics/pkg/apis/external_metrics"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/cmd"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/provider"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/provider/defaults"
)

type scraped struct {
	defaults.DefaultExternalMetricsProvider
	url    string
	labels map[string]string // added to every sample, as a PodMonitor does
}

// GetExternalMetric returns one value, or an error if the metric does not exist or the selector does not match.
func (s *scraped) GetExternalMetric(
	ctx context.Context, _ string, selector labels.Selector, info provider.ExternalMetricInfo,
) (*external_metrics.ExternalMetricValueList, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	var parser expfmt.TextParser
	families, err := parser.TextToMetricFamilies(response.Body)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.url, err)
	}
	family := families[info.Metric]
	if family == nil || !selector.Matches(labels.Set(s.labels)) {
		return nil, errors.NewNotFound(external_metrics.Resource("metrics"), info.Metric)
	}
	sum := 0.0
	for _, sample := range family.Metric {
		sum += sample.GetGauge().GetValue() + sample.GetCounter().GetValue()
	}
	value := external_metrics.ExternalMetricValue{
		MetricName:   info.Metric,
		MetricLabels: s.labels,
		Timestamp:    metav1.Now(),
		Value:        *resource.NewMilliQuantity(int64(sum*1000), resource.DecimalSI),
	}
	return &external_metrics.ExternalMetricValueList{Items: []external_metrics.ExternalMetricValue{value}}, nil
}

func main() {
	logs.InitLogs()
	defer logs.FlushLogs()
	adapter := &cmd.AdapterBase{Name: "metrics-api"}
	source := &scraped{}
	adapter.Flags().StringVar(&source.url, "metrics-url", "", "where the metrics are read")
	adapter.Flags().StringToStringVar(&source.labels, "metrics-labels", nil, "labels of every sample")
	if err := adapter.Flags().Parse(os.Args); err != nil {
		klog.Fatal(err)
	}
	adapter.WithExternalMetrics(source)
	if err := adapter.Run(context.Background()); err != nil {
		klog.Fatal(err)
	}
}
