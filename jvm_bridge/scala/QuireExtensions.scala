package io.quire.spark

import org.apache.spark.rdd.RDD
import org.apache.spark.sql.SparkSessionExtensions
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Attribute, AttributeReference, GenericInternalRow, JoinedRow, PythonUDF}
import org.apache.spark.sql.catalyst.plans.physical.Partitioning
import org.apache.spark.sql.catalyst.rules.Rule
import org.apache.spark.sql.execution.{ColumnarRule, SparkPlan, UnaryExecNode}
import org.apache.spark.sql.execution.python.MapInArrowExec
import org.apache.spark.sql.execution.python.streaming.TransformWithStateInPySparkExec
import org.apache.spark.sql.execution.streaming.operators.stateful.transformwithstate.{TransformWithStateExec, TransformWithStateExecBase}
import org.apache.spark.sql.execution.streaming.state.quire.SparkInternals
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.IntegerType

/**
 * The session extension that lets transformWithState keep its state in Quire, aggregations look up
 * many keys at a time ([[RestoreTogether]]), and Python's operators find the checkpoint of their query
 * and their place in it: `spark.sql.extensions=io.quire.spark.QuireExtensions`. All other operators,
 * and aggregations that can do with less speed, need the provider alone.
 *
 * transformWithState accepts a state store by the name of its provider. This puts nodes in its
 * place that accept Quire's name too, and are the same in everything else.
 */
class QuireExtensions extends (SparkSessionExtensions => Unit) {
  override def apply(extensions: SparkSessionExtensions): Unit =
    extensions.injectColumnar(_ => new ColumnarRule {
      override def preColumnarTransitions: Rule[SparkPlan] =
        plan => RestoreTogether(TellPartition(TellCheckpoint(AcceptQuire(plan))))
    })
}

/**
 * Tells the tasks of a micro-batch where the checkpoint of their query is, by a local property:
 * statestore/stateful.py. A rule is where Quire comes by in the thread that will start the jobs.
 */
private[spark] object TellCheckpoint extends Rule[SparkPlan] {
  val Property = "quire.checkpoint"

  override def apply(plan: SparkPlan): SparkPlan = {
    if (plan.exists(_.isInstanceOf[MapInArrowExec])) {
      val context = plan.session.sparkContext
      SparkInternals.checkpointOfQuery(plan.session)
        .foreach(context.setLocalProperty(Property, _))
    }
    plan
  }
}

/** Puts a node below each operator in Python that tells it the partition. */
private[spark] object TellPartition extends Rule[SparkPlan] {
  override def apply(plan: SparkPlan): SparkPlan = plan.transform {
    case node @ MapInArrowExec(operator: PythonUDF, _, child, _, _)
        if operator.name.startsWith("quire_") && !child.isInstanceOf[TellPartitionExec] =>
      node.withNewChildren(Seq(TellPartitionExec(child)))
  }
}

/**
 * Adds a column, and a row before those of each partition that has the partition's number there and
 * nothing else (statestore/stateful.py). The number of the task is another one where the operator's
 * output goes through a coalesce or a union: a task has several partitions then, or there are more
 * tasks than these.
 */
private[spark] case class TellPartitionExec(child: SparkPlan) extends UnaryExecNode {
  // Not in the logical plan: a projection there lets Spark take an empty batch away altogether.
  override val output: Seq[Attribute] =
    child.output :+ AttributeReference(TellPartitionExec.Column, IntegerType)()
  override def outputPartitioning: Partitioning = child.outputPartitioning

  override protected def doExecute(): RDD[InternalRow] = {
    val columns = child.output.length
    child.execute().mapPartitionsWithIndex { (partition, rows) =>
      val nothing = new GenericInternalRow(1)
      val joined = new JoinedRow
      Iterator.single(new JoinedRow(new GenericInternalRow(columns), InternalRow(partition))) ++
        rows.map(joined(_, nothing))
    }
  }

  override protected def withNewChildInternal(newChild: SparkPlan): SparkPlan =
    copy(child = newChild)
}

private[spark] object TellPartitionExec {
  val Column = "__quire_partition"
}

/**
 * Swaps the nodes of transformWithState for those that accept Quire. It works as a columnar rule
 * because these run after the streaming engine has put version and watermark into the plan.
 */
private[spark] object AcceptQuire extends Rule[SparkPlan] {
  override def apply(plan: SparkPlan): SparkPlan = plan.transform {
    case node: AcceptsQuire => node
    // A batch query keeps its short-lived state in the store that Spark names, and passes anyway.
    case node: TransformWithStateExec if node.isStreaming => QuireTransformWithStateExec(node)
    case node: TransformWithStateInPySparkExec if node.isStreaming =>
      QuireTransformWithStateInPySparkExec(node)
  }
}

/** A node of transformWithState that accepts Quire as its store, beside those that Spark does. */
private[spark] trait AcceptsQuire extends TransformWithStateExecBase {

  // Plans look as they do without the extension.
  override def nodeName: String = super.nodeName.stripPrefix("Quire")

  override protected def validateStateStoreProvider(isStreaming: Boolean): Unit =
    if (conf.getConf(SQLConf.STATE_STORE_PROVIDER_CLASS) != AcceptsQuire.Provider) {
      super.validateStateStoreProvider(isStreaming)
    }
}

private[spark] object AcceptsQuire {
  val Provider = "io.quire.spark.QuireStateStoreProvider"
}
